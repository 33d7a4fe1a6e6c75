"""Training in islands: LocalSGD (Stich, ICLR 2019), DiLoCo (Douillard et al., arXiv 2311.08105) and Streaming DiLoCo
(Douillard et al., arXiv 2501.18512).

Within an island gradients are averaged in every step. Between islands nothing travels until an *outer step*: what the
weights have moved by since the last one, averaged over the islands by the samples that they have had, is the gradient
of an outer optimizer with Nesterov momentum, whose weights every island then continues from. With LocalSGD that is the
mean of the weights.

The outer optimizer knows nothing of how many ranks an island has. Islands of unlike size share the exchange as widely
as the narrowest one allows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elastic.checkpoint.shares import Apart, Live, Shares, StepPart, Told, refusal
from elastic.comm.collective_ledger import CollectiveLedger
from elastic.comm.strategies.error_feedback import Shapes, parts_of
from elastic.comm.strategies.reduction import in_buckets
from elastic.core.checkpoint.rounds import LOCAL_SGD, STREAMING, Rounds
from elastic.core.checkpoint.shares import island_name, island_of, outer_name, outer_of
from elastic.core.errors import UsageError
from elastic.core.policy.hops import NODE, NODES
from elastic.core.settings import CommunicationSettings

_WEIGHTS, _MOMENTUM, _SAMPLES = "weights", "momentum", "samples"


@dataclass(frozen=True)
class IslandGroups:
    """`places` are the ranks of every island, `index` is that of this rank. `inside`: the group of its ranks; `lane`:
    of the ranks at this rank's place in all islands, None where an island has no such place; `every`: of all ranks."""

    places: tuple[tuple[int, ...], ...]
    index: int
    place: int
    inside: dist.ProcessGroup
    lane: dist.ProcessGroup | None
    every: dist.ProcessGroup

    @classmethod
    def make(cls, places: tuple[tuple[int, ...], ...], every: dist.ProcessGroup) -> IslandGroups:
        """Collective."""
        rank = dist.get_rank(every)
        index = next(number for number, own in enumerate(places) if rank in own)
        place, width = places[index].index(rank), min(map(len, places))
        # Known to their members alone.
        inside = dist.new_group(sorted(places[index]), use_local_synchronization=True)
        lane = None
        if place < width and len(places) > 1:
            lane = dist.new_group(sorted(own[place] for own in places), use_local_synchronization=True)
        return cls(places, index, place, inside, lane, every)

    @property
    def count(self) -> int:
        return len(self.places)

    @property
    def width(self) -> int:
        """Of the narrowest island."""
        return min(map(len, self.places))


@dataclass
class _Flight:
    """The exchange of a fragment under way: `part` holds this lane's elements, and the samples behind them."""

    fragment: int
    lands: int
    delta: Tensor
    part: Tensor | None
    handle: Any


class LocalUpdates(Shares):
    """Of one rank in one generation. `shapes` are those of all trained parameters, in their order.

    1. `begin` once, before a restore 2. in every step `reduce`, the optimizer's step, `updated`: each by all ranks
    """

    def __init__(
        self,
        settings: CommunicationSettings,
        groups: IslandGroups,
        shapes: Shapes,
        device: torch.device,
        ledger: CollectiveLedger,
        watched: bool,
    ) -> None:
        """`watched`: a gradient that is not finite on one rank is not finite on any."""
        self._settings, self._groups, self._shapes, self._device = settings, groups, shapes, device
        self._rounds = Rounds.of(settings)
        self._fragments = parts_of(shapes, self._rounds.fragments)
        own = parts_of(shapes, len(groups.places[groups.index]))[groups.place]
        # Of what the ranks of an island have copies of, what this one saves.
        self._saves = frozenset(own)
        plain = settings.strategy == LOCAL_SGD
        self._lr, self._beta = (1.0, 0.0) if plain else (settings.outer_lr, settings.outer_momentum)
        self._outer: dict[str, Tensor] = {}
        self._momentum: dict[str, Tensor] = {}
        # Since its last exchange, by fragment: the samples of this island; was any step made?
        self._samples = [0.0] * len(self._fragments)
        self._open = False
        self._flight: _Flight | None = None
        self._own, self._applied = 0.0, True
        self._live: Live | None = None
        self._part: Callable[[], StepPart] | None = None
        self._watched = watched
        inside, across = f"{NODE}, {len(groups.places[groups.index])} ranks", f"{NODES}, {groups.count} ranks"
        self._add_inside = ledger.timed("all_reduce", partial(dist.all_reduce, group=groups.inside), axis=inside)
        self._add_across = ledger.timed("all_reduce", partial(dist.all_reduce, group=groups.lane), axis=across)
        self._least = ledger.timed("all_reduce", partial(dist.all_reduce, group=groups.every), axis="dp")
        first = groups.places[0]
        streams = settings.strategy == STREAMING
        self.apart = Apart(groups.inside, groups.count, groups.index, tuple(sorted(first)), streams)
        sizes = " and ".join(str(len(own)) for own in groups.places)
        self._ledger = ledger
        ledger.remark = (
            f"{settings.strategy}: {groups.count} island{'s' * (groups.count != 1)} of {sizes} ranks, an outer step "
            f"every {self._rounds.gap} steps"
        )

    def begin(self, live: Callable[[], Live], part: Callable[[], StepPart], told: Told) -> None:
        self._live, self._part = live(), part

    @torch.no_grad()
    def reduce(self, gradients: Mapping[str, Tensor]) -> None:
        """To the mean over the samples that this island has of the step, in place; zero where it has none. Each rank
        gives its part of the mean over all samples, times the number of ranks."""
        if gradients.keys() != self._shapes.keys():
            odd = min(gradients.keys() ^ self._shapes.keys())
            raise UsageError(f"communication: parameter {odd!r} was frozen or released after elastic.initialize")
        assert self._part is not None
        part = self._part()
        self._remember()
        count = torch.tensor(part.samples, dtype=torch.float32, device=self._device)
        self._inside(count)
        self._own = round(float(count))
        ranks = sum(map(len, self._groups.places))
        scale = part.total / (self._own * ranks) if self._own else 0.0
        finite = torch.ones((), dtype=torch.int64, device=self._device)
        for bucket in in_buckets(gradients, int(self._settings.bucket_mb * 1e6)):
            flat = torch.cat([tensor.reshape(-1).float() for tensor in bucket]).mul_(scale)
            self._inside(flat)
            finite *= flat.isfinite().all()
            for tensor, piece in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(piece.view_as(tensor))
        self._applied = True
        if self._watched and self._groups.count > 1:
            self._least(finite, op=dist.ReduceOp.MIN)
        if self._watched and not bool(finite):
            # All islands do with the step what one has to.
            self._applied = False
            for tensor in gradients.values():
                tensor.fill_(torch.nan)

    @torch.no_grad()
    def updated(self) -> None:
        """The optimizer has made the step, or skipped it."""
        assert self._part is not None
        part = self._part()
        step = part.step + 1
        if self._applied:
            self._samples = [count + self._own for count in self._samples]
        self._open = True
        if self._flight is not None and step >= self._flight.lands:
            self._land()
        fragment = self._rounds.begins(step)
        if part.last:
            self.settle()
        elif fragment is not None:
            self._depart(fragment, step + self._rounds.overlap)
            if not self._rounds.overlap:
                self._land()
            self._open = self._rounds.own_weights

    # -- outer steps ---------------------------------------------------------------------------------------------------

    @property
    def whole(self) -> bool:
        return self._flight is None if self._rounds.own_weights else not self._open

    @torch.no_grad()
    def settle(self) -> None:
        """An outer step of everything that has moved: all islands have equal weights then."""
        if self._flight is not None:
            self._land()
        for fragment in range(len(self._fragments)) if self._open else ():
            self._depart(fragment, 0)
            self._land(mixed=False)
        self._open = False

    def _depart(self, fragment: int, lands: int) -> None:
        live, count = self._weights(), self._samples[fragment]
        self._samples[fragment] = 0.0
        delta = torch.cat([self._outer[name] - live[name].float() for name in self._fragments[fragment]])
        part, handle = None, None
        if self._groups.lane is not None:
            own = delta.tensor_split(self._groups.width)[self._groups.place]
            part = torch.cat([own * count, own.new_tensor([count])])
            handle = self._add_across(part, async_op=bool(lands))
        self._flight = _Flight(fragment, lands, delta, part, handle)

    def _land(self, mixed: bool = True) -> None:
        flight, self._flight = self._flight, None
        assert flight is not None
        if flight.handle is not None:
            flight.handle.wait()
        mean = self._gathered(flight)
        names, live = self._fragments[flight.fragment], self._weights()
        mix = self._settings.mix if mixed and self._rounds.overlap else 0.0
        for name, delta in zip(names, torch.split(mean, [prod(self._shapes[name]) for name in names]), strict=True):
            # New tensors: a snapshot may still be reading the old ones.
            if self._beta:
                self._momentum[name] = self._beta * self._momentum[name] + delta
                delta = delta + self._beta * self._momentum[name]
            self._outer[name] = self._outer[name] - self._lr * delta
            live[name].mul_(mix).add_(self._outer[name], alpha=1.0 - mix)
        assert self._live is not None
        self._live.changed()

    def _gathered(self, flight: _Flight) -> Tensor:
        """The mean over the islands of all lanes' parts."""
        if self._groups.count == 1:
            return flight.delta
        mean = torch.zeros_like(flight.delta)
        if flight.part is not None:
            samples = flight.part[-1]
            own = mean.tensor_split(self._groups.width)[self._groups.place]
            own.copy_(flight.part[:-1] / samples if bool(samples) else own)
        self._inside(mean)
        return mean

    def _inside(self, tensor: Tensor) -> None:
        if len(self._groups.places[self._groups.index]) > 1:
            self._add_inside(tensor)

    def _weights(self) -> dict[str, Tensor]:
        assert self._live is not None
        return self._live.weights()

    def _remember(self) -> None:
        """What the first outer step begins from. Scripts may set weights up to the first step."""
        if not self._outer:
            self._outer = {name: tensor.detach().float().clone() for name, tensor in self._weights().items()}
        if not self._momentum and self._beta:
            self._momentum = {name: torch.zeros_like(tensor) for name, tensor in self._outer.items()}

    # -- what is saved -------------------------------------------------------------------------------------------------

    def shapes_kept(self) -> dict[str, tuple[int, ...]]:
        """Of all islands, and the outer state."""
        kinds = sorted({kind for kind, _ in self._moments()})
        flat = {name: (prod(shape),) for name, shape in self._shapes.items()}
        count, found = self._groups.count, dict[str, tuple[int, ...]]()
        for island in range(count):
            for kind in (*kinds, *([_WEIGHTS] if self._rounds.own_weights else ())) if island else ():
                found |= {island_name(island, count, kind, name): shape for name, shape in flat.items()}
            if self._rounds.own_weights:
                found[island_name(island, count, _SAMPLES, "")] = (len(self._samples),)
        for kind in self._outer_state():
            found |= {outer_name(kind, name): shape for name, shape in flat.items()}
        return found

    def kept(self) -> dict[str, Tensor]:
        groups, found = self._groups, dict[str, Tensor]()
        named = partial(island_name, groups.index, groups.count)
        if groups.index > 0:
            found |= {named(*key): tensor for key, tensor in self._moments().items() if key[1] in self._saves}
            if self._rounds.own_weights:
                live = self._weights()
                found |= {named(_WEIGHTS, name): live[name] for name in live if name in self._saves}
        else:
            for kind, tensors in self._outer_state().items():
                found |= {outer_name(kind, name): tensor for name, tensor in tensors.items() if name in self._saves}
        if self._rounds.own_weights and groups.place == 0:
            found[named(_SAMPLES, "")] = torch.tensor([round(count) for count in self._samples], device=self._device)
        return found

    def reads(self, name: str) -> bool:
        """This island's state, or that of another one that it begins with; rank 0 also what no island takes over, so
        that all that was saved is verified."""
        island, outer = island_of(name), outer_of(name)
        if outer is not None and outer[0] in self._outer_kinds:
            return True
        if island is None or (island[2] in (_WEIGHTS, _SAMPLES) and not self._rounds.own_weights):
            raise UsageError(refusal(name))
        number, count, *_ = island
        return number == self._groups.index % count or self.answers(name)

    def answers(self, name: str) -> bool:
        island, groups = island_of(name), self._groups
        if island is None or island[0] >= groups.count:
            return groups.index == 0 and groups.place == 0
        return groups.index == island[0] and groups.place == 0

    @torch.no_grad()
    def install(self, saved: Mapping[str, Tensor]) -> None:
        """An island that was not there begins with the outer weights, and with the optimizer's state of another one."""
        outer: dict[str, dict[str, Tensor]] = {}
        for name, tensor in saved.items():
            if (found := outer_of(name)) is not None:
                outer.setdefault(found[0], {})[found[1]] = tensor.clone().to(self._device)
        self._momentum, self._outer = outer.get(_MOMENTUM, {}), outer.get(_WEIGHTS, {})
        before = max((known[1] for name in saved if (known := island_of(name)) is not None), default=0)
        if before > self._groups.count:
            self._ledger.remark += f"; of {before} islands before, what the optimizers of the last ones kept is dropped"
        elif 0 < before < self._groups.count:
            self._ledger.remark += f"; of {before} islands before, new ones begin with what their optimizers keep"
        live, moments = self._weights(), self._moments()
        joins = False
        for name, tensor in saved.items():
            number, count, kind, parameter = island_of(name) or (-1, 1, "", "")
            if number != self._groups.index % count:
                continue
            joins = self._groups.index >= count
            if kind == _SAMPLES:
                self._samples = [0.0 if joins else float(value) for value in tensor]
            elif kind == _WEIGHTS:
                live[parameter].copy_(tensor)
            else:
                moments[kind, parameter].copy_(tensor)
        if self._rounds.own_weights and self._outer:
            self._open = True
            for name in live if joins else ():
                live[name].copy_(self._outer[name])
        assert self._live is not None
        self._live.changed()

    @property
    def _outer_kinds(self) -> tuple[str, ...]:
        """Where islands are saved with equal weights, those are the outer ones."""
        return (*([_MOMENTUM] if self._beta else ()), *([_WEIGHTS] if self._rounds.own_weights else ()))

    def _outer_state(self) -> dict[str, dict[str, Tensor]]:
        self._remember()
        state = {_MOMENTUM: self._momentum, _WEIGHTS: self._outer}
        return {kind: state[kind] for kind in self._outer_kinds}

    def _moments(self) -> dict[tuple[str, str], Tensor]:
        assert self._live is not None
        return self._live.moments()
