"""What must be equal on all ranks, compared before a snapshot: replicated tensors, scalars, hyper-parameters, counters.

A snapshot carries one rank's copy and a restore gives it to all ranks, so copies that have drifted apart would silently
become another run. Module buffers and extra state of modules are left out: those of rank 0 are the run's.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
import xxhash

from elastic.checkpoint.shares import Apart
from elastic.comm.agreement import Agreement
from elastic.comm.lanes import Lanes
from elastic.core.errors import IntegrityError
from elastic.engines.base import Engine
from elastic.engines.inventory import Inventory
from elastic.engines.live_state import BUFFER, KEPT, MASTER, PARAM, ShardedState, Weight
from elastic.training.state.verification import listed
from elastic.training.state.verify_weights import MASK63, fingerprints
from elastic.training.user.rates import RatesApart

# Weights that follow from masters are not carried, so a snapshot compares so many bytes of them, in turn.
_SAMPLE_BYTES = 64 << 20
HYPER = "hyper-parameters of group"
_WEIGHTS = "weights of "
_OF_ALL_STAGES = (HYPER, "loss scaler", "learning-rate scheduler", "counters")
# Of the norms of a tied weight's copies. Stages add up their gradients in another order, so that the last bits differ.
_TIED_APART = 1e-3
_NOWHERE = (1 << 63) - 1
# Of a worker that has joined, the training function has begun later.
_COUNTER = (
    "; a learning rate that the loop sets from a counter of its own is one on a worker that joins later: count by "
    "elastic.get_context().step"
)


class Replicas:
    """This rank's copies at one moment. `turn` chooses the sample of the weights and is the same number on all ranks;
    None: all of them. With several `lanes` the ranks of others have copies only of weights that no rank has a slice of,
    and of what stages of a pipeline have in common. `apart`: only those of this island have what optimizers keep.

    Fingerprints by what they are of: of what all ranks have copies of (`everywhere`), those of this lane or with its
    shard (`own`), where there are such and lanes the others of this lane (`beside`), and where weights are partitioned
    the ranks of this rank's cell (`across`)."""

    def __init__(
        self,
        engine: Engine,
        state: ShardedState,
        inventory: Inventory,
        turn: int | None,
        lanes: Lanes,
        apart: Apart | None = None,
    ) -> None:
        carried, weights = _carried(inventory), state.weights()
        derived = _derived(weights, carried)
        # On an accelerator each rank computes the gradient of what is not cut by itself, in an order that may differ:
        # there copies of several lanes need not be equal to the last bit, unless torch is told to be deterministic.
        exact = engine.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
        compared = exact and lanes.slices > 1
        uncut = _uncut(weights, inventory) if compared and state.writers is None else set()
        # Lanes may differ in size: what all ranks have must be the same sample in each of them.
        everywhere = {what: tensor for what, tensor in derived.items() if what in uncut}
        beside = {what: tensor for what, tensor in derived.items() if what not in uncut}
        tensors = carried | _sample(everywhere, turn) | _sample(beside, turn)
        hashes = _hashed(tensors)
        hashes |= {what: _hash(text) for what, text in _texts(engine, state, inventory).items()}
        experts = {_WEIGHTS + weight.name for weight in weights if weight.experts and state.copies is not None}
        if state.writers is not None:
            experts |= {what for what in carried if not what.startswith(f"{KEPT}/")}
        among = {master.buffer for master in inventory.masters if master.among is not None}
        experts |= {what for what in carried if what.partition("/")[2] in among}
        own = experts if apart is None else {what for what in tensors if apart.weights or _of_optimizer(what)}
        of_lane: set[str] = set()
        if lanes.stages > 1:
            of_lane = {what for what in hashes if not what.startswith(_OF_ALL_STAGES)}
            own = of_lane if state.writers is None else own
        elif lanes.count > 1 and state.writers is None:
            of_lane = hashes.keys() - uncut | experts
            own = experts or of_lane
        self.own = {what: value for what, value in hashes.items() if what in own}
        self.beside = {what: value for what, value in hashes.items() if what in of_lane - own}
        self.everywhere = {what: value for what, value in hashes.items() if what not in own | of_lane}
        self.across = _hashed(_sample(_parts(weights, state.writers is not None), turn) if compared else {})

    def fingerprints(self) -> tuple[int, int, int, int]:
        """Numbers of 63 bits of `everywhere`, `own`, `beside` and `across`."""
        everywhere, own, beside, across = map(_hash, map(repr, (self.everywhere, self.own, self.beside, self.across)))
        return everywhere, own, beside, across

    def difference(self, agreement: Agreement, everywhere: bool, hashes: Mapping[str, int]) -> IntegrityError:
        """After those of `hashes`, or of what is everywhere, were found to differ: which rank's copy of what.
        Collective; every rank gets the same."""
        values = self.everywhere if everywhere else hashes
        # Where ranks hold different things, there is nothing to compare one by one.
        lists = [hashed for (hashed,) in agreement.by_rank([_hash(repr([*values]))])]
        found = {"the list of what it holds": outliers(lists)}
        if len(set(lists)) == 1:
            by_rank = agreement.by_rank(list(values.values()))
            found = {what: outliers(column) for what, column in zip(values, zip(*by_rank, strict=True), strict=True)}
        named = {what: ", ".join(str(agreement.ranks[rank]) for rank in ranks) for what, ranks in found.items()}
        what = listed([f"{what} on rank {ranks}" for what, ranks in named.items() if ranks])
        by_loop = all(name.startswith(HYPER) for name, ranks in found.items() if ranks)
        return (RatesApart if by_loop else IntegrityError)(
            f"the ranks' copies of one state have drifted apart: {what} differs from the other ranks'. A snapshot "
            "would carry one of them only; go back to an older checkpoint, and look for code that changes state on "
            f"some ranks alone{_COUNTER if HYPER in what else ''}"
        )


def tied_parts(state: ShardedState) -> list[tuple[str, int]]:
    """The tied parameters of the model, each with every part that ranks of a stage have of it; on all ranks alike."""
    parts, _ = state.part
    return [(name, part) for name in state.tied for part in range(parts)]


def marks_of_tied(state: ShardedState) -> list[int]:
    """Two numbers for each of `tied_parts`, whose least over all ranks `require_tied` understands."""
    if not state.tied:
        return []
    _, part = state.part
    own = {weight.name: torch.linalg.vector_norm(weight.tensor, dtype=torch.float64) for weight in state.weights()
           if weight.name in state.tied}  # fmt: skip
    # The bits of a positive number are in its order.
    norms = {(name, part): value.cpu().view(torch.int64).item() for name, value in own.items()}
    places = tied_parts(state)
    return [int(mark) for place in places for mark in ((norms[place], -norms[place]) if place in norms else _NONE)]


def require_tied(state: ShardedState, least: Sequence[int]) -> None:
    """Raises IntegrityError, on all ranks, where the copies of a tied parameter are not the same weights any more."""
    for (name, _), low, high in zip(tied_parts(state), least[::2], least[1::2], strict=True):
        smallest, largest = torch.tensor([low, -high]).view(torch.float64).tolist()
        if low != _NOWHERE and not largest - smallest <= _TIED_APART * largest:
            raise IntegrityError(
                f"the copies of the tied parameter {name!r} have drifted apart between the stages of the pipeline: "
                f"norms from {smallest:g} to {largest:g}; look for code that changes it on some ranks alone"
            )


_NONE = (_NOWHERE, _NOWHERE)


def numbers(values: Sequence[object]) -> list[object]:
    """Tensors as Python numbers, everything else as it is. Waits for a device once, however many lie there."""
    found, alike = list(values), dict[object, list[tuple[int, torch.Tensor]]]()
    for at, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            alike.setdefault((value.device, value.dtype, value.shape), []).append((at, value.detach()))
    for members in alike.values():
        for (at, _), number in zip(members, torch.stack([value for _, value in members]).tolist(), strict=True):
            found[at] = number
    return found


def outliers(values: Sequence[int]) -> list[int]:
    """The ranks whose value is not the most common one; between equally common ones that of the lowest rank counts."""
    common = Counter(values).most_common(1)[0][0]
    return [rank for rank, value in enumerate(values) if value != common]


def _carried(inventory: Inventory) -> dict[str, torch.Tensor]:
    """Replicated tensors that snapshots carry: "<kind>/<name>" -> tensor."""
    found: dict[str, torch.Tensor] = {}
    for master, state in zip(inventory.masters, inventory.states, strict=True):
        if master.replicated:
            found[f"{MASTER}/{master.buffer}"] = master.tensor
            found |= {f"{kind}/{master.buffer}": tensor for kind, tensor in sorted(state.tensors.items())}
    kept = (extra for extra in inventory.extras if extra.replicated and extra.kind != BUFFER)
    return found | {f"{extra.kind}/{extra.chunk.name}": extra.tensor for extra in kept}


def _derived(weights: Iterable[Weight], carried: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights that this rank holds whole, but for those that are masters themselves."""
    known = {tensor.data_ptr() for tensor in carried.values()}
    whole = (weight for weight in weights if weight.whole)
    return {_WEIGHTS + weight.name: weight.tensor for weight in whole if weight.tensor.data_ptr() not in known}


def _of_optimizer(what: str) -> bool:
    return not what.startswith((f"{MASTER}/", f"{PARAM}/", f"{KEPT}/", _WEIGHTS))


def _uncut(weights: Iterable[Weight], inventory: Inventory) -> set[str]:
    """What the ranks of all lanes compute alike, by what it is called here: parameters that are not cut."""
    names = {weight.name for weight in weights if weight.whole and not (weight.sliced or weight.experts)}
    found = {_WEIGHTS + name for name in names}
    for master, kept in zip(inventory.masters, inventory.states, strict=True):
        if master.replicated and names.issuperset(master.names):
            found |= {f"{kind}/{master.buffer}" for kind in (MASTER, *kept.tensors)}
    return found


def _parts(weights: Iterable[Weight], copied: bool) -> dict[str, torch.Tensor]:
    """This rank's parts of such parameters, where they are partitioned: those of its cell have the same. `copied`: all
    that there are, of which others have copies besides."""
    uncut = (weight for weight in weights if not weight.sliced)
    parts = (weight for weight in uncut if copied or not (weight.whole or weight.experts))
    return {_WEIGHTS + weight.name: weight.tensor for weight in parts}


def _hashed(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return dict(zip(tensors, fingerprints(list(tensors.values())), strict=True))


def _sample(tensors: Mapping[str, torch.Tensor], turn: int | None) -> dict[str, torch.Tensor]:
    """Neighbours of at most `_SAMPLE_BYTES` together, or one tensor; consecutive turns take all of them."""
    if turn is None:
        return dict(tensors)
    bins: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        if bins[-1] and size + nbytes > _SAMPLE_BYTES:
            bins.append({})
            size = 0
        bins[-1][name] = tensor
        size += nbytes
    return bins[turn % len(bins)]


def _texts(engine: Engine, state: ShardedState, inventory: Inventory) -> dict[str, str]:
    """What is no tensor, read from where it lives: name -> text, with the same names on every rank."""
    base, extra = state.base, engine.extra_state()
    read = iter(numbers([value for kept in inventory.states for value in kept.scalars.values()]))
    found = {
        f"optimizer scalars of {master.buffer}": repr(sorted((key, next(read)) for key in kept.scalars))
        for master, kept in zip(inventory.masters, inventory.states, strict=True)
    }
    for number, group in enumerate(base.param_groups):
        hyper = ((key, _plain(value)) for key, value in group.items() if key != "params")
        found[f"{HYPER} {number}"] = repr(sorted(hyper, key=lambda item: item[0]))
    for what, key in (("loss scaler", "loss_scaler"), ("learning-rate scheduler", "scheduler"), ("counters", "engine")):
        found[what] = json.dumps(extra[key], sort_keys=True)
    return found


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode()) & MASK63
