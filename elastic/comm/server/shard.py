"""One range of the parameters on one server: gradients are kept until the update that they belong to is made.

What is done to a shard is the same on both of its copies, in the same order, and gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from elastic.core.errors import IntegrityError, UsageError
from elastic.core.server.global_batches import KEPT_CUTS, Batch, Part, rank_batch

Tensors = Mapping[str, torch.Tensor]
# What each group of an optimizer updates with.
Options = tuple[dict[str, Any], ...]

# They update every weight by itself, so that a shard needs nothing of the others.
OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD, "Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW,
}  # fmt: skip
# A shard is behind another by less than the staleness of a run.
KEPT_SQUARES = 1000
_STATE, _PENDING, _CUT = "state", "pending", "cut"
PARAMETER, STEP = "parameter", "step"


@dataclass(frozen=True)
class Group:
    """A parameter group of the optimizer: numbers [begin, end) of the flat vector, and its options."""

    begin: int
    end: int
    options: dict[str, Any]


@dataclass(frozen=True)
class ShardSpec:
    """[begin, end) of the flat fp32 vector. An update's learning rate is its group's times `rates[version]`, of which
    the last holds for all later ones."""

    begin: int
    end: int
    optimizer: str
    groups: tuple[Group, ...]
    micros: int
    cut_every: int = 0
    rates: tuple[float, ...] = (1.0,)
    # The state before the last update stays, too.
    keeps_last: bool = False
    shards: int = 1
    # Updates are made with a part of their gradient, by the norm of all of it.
    clips: bool = False


class Shard:
    """Not for several threads at once."""

    def __init__(self, spec: ShardSpec, version: int, state: Tensors) -> None:
        """`state` has, for each piece of a group in this range, its parameters and its optimizer's state if it has any:
        see `piece_labels`."""
        if spec.optimizer not in OPTIMIZERS:
            raise UsageError(
                f"optimizer {spec.optimizer} cannot run on a parameter server; use {', '.join(OPTIMIZERS)}"
            )
        self.spec = spec
        self.version = version
        self.flat = torch.empty(spec.end - spec.begin)
        self._pieces: dict[str, torch.nn.Parameter] = {}
        self._pending: dict[tuple[int, int], torch.Tensor] = {}
        # What each group is updated with, where it came with a gradient; by the same keys.
        self._options: dict[tuple[int, int], Options] = {}
        # The micro-batches of all updates so far: every one below the first number, and these.
        self._below, self._above = 0, set[int]()
        self._cuts: dict[int, dict[str, torch.Tensor]] = {}
        # By step and rank, from the newest `forget` on: see `Close`.
        self.notes: dict[int, dict[int, str]] = {}
        # Of the last updates: the squared norm of this shard's part of their mean gradient.
        self._squares: dict[int, float] = {}
        groups = []
        for label, begin, end, options in pieces(spec):
            view = self.flat[begin - spec.begin : end - spec.begin]
            view.copy_(state[f"{label}/{PARAMETER}"])
            self._pieces[label] = torch.nn.Parameter(view)
            groups.append({**options, "params": [self._pieces[label]], "foreach": False})
        self._optimizer = OPTIMIZERS[spec.optimizer](groups, lr=0.0)
        self._rates = [group["lr"] for group in groups]
        for name, value in state.items():
            label, _, key = name.rpartition("/")
            if key != PARAMETER:
                kept = value.clone().reshape(()) if key == STEP else value.clone()
                self._optimizer.state[self._pieces[label]][key] = kept

    def push(self, part: Part, gradient: torch.Tensor, options: Options = ()) -> None:
        """Keep the gradient of a lease, which becomes this shard's own. Of a micro-batch that is in an update already
        nothing is kept: its lease was given to another worker meanwhile. `options`: see `Push`."""
        if gradient.numel() != self.flat.numel():
            raise IntegrityError(f"a gradient of {gradient.numel()} numbers was sent to a shard of {self.flat.numel()}")
        if part.micro >= self._below and part.micro not in self._above:
            self._pending[part.micro, part.number] = gradient
            if options:
                self._options[part.micro, part.number] = options

    def missing(self, batch: Batch) -> list[Part]:
        """The gradients of a batch that are not here."""
        return [part for part in batch if (part.micro, part.number) not in self._pending]

    def squares(self) -> dict[int, float]:
        """By version, of the last updates and of all that can be made: the squared norm of the mean gradient here.
        Empty where gradients are not clipped."""
        last = self.given[1] if self.spec.clips else 0
        for version in range(self.version, last):
            if version not in self._squares:
                self._squares[version] = _square(self._mean(rank_batch(version, self.spec.micros)))
        return self._squares

    def _mean(self, batch: Batch) -> torch.Tensor:
        total = torch.zeros_like(self.flat)
        for part in batch:
            total += self._pending[part.micro, part.number]
        return total.div_(self.spec.micros)

    def apply(self, version: int, batch: Batch, scale: float | None = None) -> None:
        """The update from `version` to the next with the mean of a batch's gradients, added up in the batch's order,
        times `scale` where gradients are clipped."""
        if version != self.version or (lost := self.missing(batch)):
            why = f"is at {self.version}" if version != self.version else f"does not have {lost}"
            raise IntegrityError(f"a shard that {why} cannot make update {version}")
        total = self._mean(batch)
        if self.spec.clips:
            if scale is None:
                raise IntegrityError(f"update {version} cannot be made: nobody has said by how much it is clipped")
            self._squares.setdefault(version, _square(total))
            total *= scale
        if self.spec.keeps_last:
            self._cuts = {version: {name: tensor.clone() for name, tensor in self.state().items()}}
        factor = self.spec.rates[min(version, len(self.spec.rates) - 1)]
        options = self._options.get((batch[0].micro, batch[0].number), ())
        for group, rate, (label, piece) in zip(
            self._optimizer.param_groups, self._rates, self._pieces.items(), strict=True
        ):
            group.update(options[int(label.partition("/")[0])] if options else {"lr": rate * factor})
            begin = piece.storage_offset()
            piece.grad = total[begin : begin + piece.numel()]
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.version += 1
        self._squares = {at: square for at, square in self._squares.items() if at >= version - KEPT_SQUARES}
        self._drop({part.micro for part in batch})
        if self.spec.cut_every and self.version % self.spec.cut_every == 0:
            self._cuts[self.version] = {name: tensor.clone() for name, tensor in self.state().items()}
            self._cuts = dict(sorted(self._cuts.items())[-KEPT_CUTS:])

    def _drop(self, micros: set[int]) -> None:
        self._pending = {key: gradient for key, gradient in self._pending.items() if key[0] not in micros}
        self._options = {key: options for key, options in self._options.items() if key[0] not in micros}
        self._above |= micros
        while self._below in self._above:
            self._above.remove(self._below)
            self._below += 1

    @property
    def given(self) -> tuple[int, int]:
        """The first and the last number of updates after which this shard can give the state, where ranks have each
        their own micro-batch in every step."""
        last = self.version
        while not self.missing(rank_batch(last, self.spec.micros)):
            last += 1
        return min((*self._cuts, self.version)), last

    def at(self, version: int, scales: Mapping[int, float]) -> Tensors:
        """The state after so many updates, of those that are `given`; updates that are lacking are made, by `scales`
        where gradients are clipped."""
        while self.version < version:
            batch = rank_batch(self.version, self.spec.micros)
            self.apply(self.version, batch, scales.get(self.version))
        return self.state() if version == self.version else self._cuts[version]

    def close(self, step: int, rank: int, note: str, forget: int) -> None:
        self.notes.setdefault(step, {})[rank] = note
        self.notes = {at: notes for at, notes in self.notes.items() if at >= forget}

    def cut(self, version: int) -> Tensors | None:
        """The state after so many updates; None where it is not kept, or not yet."""
        return self._cuts.get(version)

    def digest(self) -> str:
        return xxhash.xxh3_64_hexdigest(self.flat.numpy().data)

    def state(self) -> dict[str, torch.Tensor]:
        found = {}
        for label, piece in self._pieces.items():
            found[f"{label}/{PARAMETER}"] = piece.detach()
            for key, value in self._optimizer.state.get(piece, {}).items():
                if value is not None:
                    found[f"{label}/{key}"] = value
        return found

    def everything(self) -> tuple[dict[str, Any], Tensors]:
        """What another server needs to go on from here: see `from_everything`."""
        tensors = {f"{_STATE}/{name}": tensor for name, tensor in self.state().items()}
        tensors |= {f"{_PENDING}/{micro}/{number}": each for (micro, number), each in self._pending.items()}
        for version, cut in self._cuts.items():
            tensors |= {f"{_CUT}/{version}/{name}": tensor for name, tensor in cut.items()}
        options = [[*key, list(each)] for key, each in self._options.items()]
        notes = [[step, rank, note] for step, own in self.notes.items() for rank, note in own.items()]
        place = {"version": self.version, "below": self._below, "above": sorted(self._above)}
        squares = [*self._squares.items()]
        return {**place, "options": options, "notes": notes, "squares": squares}, tensors


def from_everything(spec: ShardSpec, meta: Mapping[str, Any], tensors: Tensors) -> Shard:
    shard = Shard(spec, meta["version"], below(_STATE, tensors))
    shard._below, shard._above = meta["below"], set(meta["above"])
    shard._options = {(micro, number): tuple(each) for micro, number, each in meta["options"]}
    shard._squares = {int(version): square for version, square in meta["squares"]}
    for step, rank, note in meta["notes"]:
        shard.close(step, rank, note, 0)
    for name, gradient in below(_PENDING, tensors).items():
        micro, number = name.split("/")
        shard._pending[int(micro), int(number)] = gradient
    for name, tensor in below(_CUT, tensors).items():
        version, _, rest = name.partition("/")
        shard._cuts.setdefault(int(version), {})[rest] = tensor
    return shard


def fresh(spec: ShardSpec, version: int, next_micro: int, missing: tuple[int, ...], state: Tensors) -> Shard:
    """A shard of a run that begins, or that continues from a cut."""
    shard = Shard(spec, version, state)
    shard._below = min(missing, default=next_micro)
    shard._above = set(range(shard._below, next_micro)) - set(missing)
    return shard


def _square(gradient: torch.Tensor) -> float:
    return float(gradient.double().square().sum())


def below(prefix: str, tensors: Tensors) -> dict[str, torch.Tensor]:
    return {name.removeprefix(f"{prefix}/"): each for name, each in tensors.items() if name.startswith(f"{prefix}/")}


def pieces(spec: ShardSpec) -> list[tuple[str, int, int, dict[str, Any]]]:
    """(label, begin, end, options) of each group's part of the range. A label tells the group and its place."""
    found = []
    for number, group in enumerate(spec.groups):
        begin, end = max(group.begin, spec.begin), min(group.end, spec.end)
        if begin < end:
            found.append((f"{number}/{begin}", begin, end, group.options))
    return found


def part_of(spec: ShardSpec, whole: Tensors) -> dict[str, torch.Tensor]:
    """A shard's state, of that of the whole vector: `whole` has each tensor of a group by "<group>/<key>"."""
    state = {}
    for label, begin, end, _ in pieces(spec):
        group = label.partition("/")[0]
        offset = spec.groups[int(group)].begin
        for key, tensor in below(group, whole).items():
            state[f"{label}/{key}"] = tensor if key == STEP else tensor[begin - offset : end - offset]
    return state


def joined(parts: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Inverse of `part_of`, of what all shards have."""
    found: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for name, tensor in parts:
        group, start, key = name.split("/")
        found.setdefault(f"{group}/{key}", []).append((int(start), tensor))
    return {
        name: pieces_of[0][1]
        if name.endswith(f"/{STEP}")
        else torch.cat([tensor for _, tensor in sorted(pieces_of, key=lambda piece: piece[0])])
        for name, pieces_of in found.items()
    }


def initial(spec: ShardSpec, flat: torch.Tensor) -> Tensors:
    """A shard's state of a run that begins with these parameters (the whole vector)."""
    return {f"{label}/{PARAMETER}": flat[begin:end] for label, begin, end, _ in pieces(spec)}
