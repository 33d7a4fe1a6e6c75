"""Bugs of resharding that only ranks with slices, experts or layers of their own can have: each put into the product's
code while a training function runs."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import torch

from elastic.core.checkpoint import lanes as product_lanes

Bug = Callable[[], AbstractContextManager[Any]]


def train(config: dict[str, Any]) -> None:
    """`config["trains"]` with `config["bug"]` in it, if any."""
    module, name = config["trains"].split(".")
    with BUGS[config["bug"]]() if config.get("bug") else nullcontext():
        getattr(importlib.import_module(module), name)(config)


@contextmanager
def _experts(wrong: Callable[[int, int, int, int], int]) -> Iterator[None]:
    """`wrong(first, share, whole, number)`: another first element of the rank's experts within its lane's; it has the
    `number`-th block of all lanes'."""
    from elastic.engines.deepspeed.experts import placement
    from elastic.engines.deepspeed.state.zero import ZeroState

    original = ZeroState.first_element

    def first(state: Any, parameter: Any) -> int:
        found, shape = original(state, parameter), placement.whole_shape(parameter, state.lanes)
        if shape is None:
            return found
        share = int(getattr(parameter, "ds_numel", parameter.numel()))
        return wrong(found, share, _numel(shape), placement.first_element(parameter) // share)

    with mock.patch.object(ZeroState, "first_element", first):
        yield


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def experts_of_the_next_rank() -> AbstractContextManager[None]:
    return _experts(lambda first, share, whole, _: (first + share) % whole)


def experts_in_reverse() -> AbstractContextManager[None]:
    return _experts(lambda first, share, whole, _: whole - first - share)


def experts_counted_over_lanes() -> AbstractContextManager[None]:
    """As if ranks that share layers shared a lane's experts: two have the same block, and nobody another one."""
    return _experts(lambda first, share, whole, number: number * share % whole)


def experts_of_one_lane_in_reverse() -> AbstractContextManager[None]:
    """Each lane still has each block once."""
    return _experts(lambda first, share, whole, number: whole - first - share if number % 2 else first)


@contextmanager
def slices_of_the_other_rank() -> Iterator[None]:
    """Both ranks of a cell take back what the other one has saved."""
    from elastic.training.state import restore

    def other(manifest: Any, lane: int) -> Any:
        return product_lanes.lane_of(manifest, manifest.tp - 1 - lane)

    with mock.patch.object(restore, "lane_of", other):
        yield


@contextmanager
def slices_of_the_other_lane() -> Iterator[None]:
    """Where slices are cut anew, they are read of another lane than the one that has them."""
    from elastic.core.checkpoint.recut import Recut

    original = Recut.boxes

    def other(found: Recut, name: str, start: int, stop: int) -> list[Any]:
        tp = found.whole.tp if name in found.source else 1
        return [replace(box, lane=tp - 1 - box.lane) for box in original(found, name, start, stop)]

    with mock.patch.object(Recut, "boxes", other):
        yield


@contextmanager
def _put(wrong: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Elements of slices that are cut anew are put elsewhere."""
    from elastic.training.state.recut import reading

    original = reading._put
    put = lambda target, values, part: original(target, wrong(values), part)  # noqa: E731
    with mock.patch.object(reading, "_put", put):
        yield


@contextmanager
def boxes_transposed() -> Iterator[None]:
    """What is read of a matrix by rows is put by columns."""
    from elastic.training.state.recut import reading

    original = reading._put

    def put(target: torch.Tensor, values: torch.Tensor, part: Any) -> None:
        original(target, values.view(part.box.rows, part.box.width).t().reshape(-1), part)

    with mock.patch.object(reading, "_put", put):
        yield


@contextmanager
def slices_of_nearly_even_widths() -> Iterator[None]:
    """Whole heads are not looked at: of four heads the first of three ranks has two."""
    from elastic.engines.deepspeed.layers import cuts

    original = cuts.cut_of

    def nearly_even(meta: Mapping[str, Any]) -> Any:
        cut = original(meta)
        if not isinstance(cut, cuts.Cut):
            return cut
        lanes, width = len(cut.ranges), cut.shape[cut.dim]
        edges = [-(-width * lane // lanes) for lane in range(lanes + 1)]
        return replace(cut, ranges=tuple((one,) for one in pairwise(edges)))

    with mock.patch.object(cuts, "cut_of", nearly_even):
        yield


def elements_one_further() -> AbstractContextManager[None]:
    return _put(lambda values: values.roll(1))


@contextmanager
def moments_of_another_kind() -> Iterator[None]:
    from elastic.training.state.reading import Staged

    original = Staged.states

    def swapped(staged: Staged, master: Any) -> dict[str, torch.Tensor]:
        found = original(staged, master)
        return {**found, "exp_avg": found["exp_avg_sq"], "exp_avg_sq": found["exp_avg"]}

    with mock.patch.object(Staged, "states", swapped):
        yield


@contextmanager
def _chunk(wrong: Callable[[Any, str, Callable[..., Any]], Any]) -> Iterator[None]:
    from elastic.engines.fsdp2.state import Fsdp2State

    original = Fsdp2State._chunk
    with mock.patch.object(Fsdp2State, "_chunk", lambda self, name: wrong(self, name, original)):
        yield


def blocks_in_reverse() -> AbstractContextManager[None]:
    """As if the shards of a slice lay in the other order (torch's _StridedShard is one way to have them so)."""

    def wrong(state: Any, name: str, original: Callable[..., Any]) -> Any:
        chunk = original(state, name)
        numel = _numel(tuple(state._parameters[name].shape))
        return (
            chunk._replace(start=numel - chunk.start - chunk.numel) if chunk.numel * state._shards == numel else chunk
        )

    return _chunk(wrong)


def rows_of_the_next_experts() -> AbstractContextManager[None]:
    """As if a rank had the experts of another one that shares them."""
    from elastic.engines.fsdp2.meshes import EXPERTS, is_experts, slice_shape

    def wrong(state: Any, name: str, original: Callable[..., Any]) -> Any:
        chunk, parameter = original(state, name), state._parameters[name]
        if not is_experts(parameter):
            return chunk
        numel = _numel(slice_shape(parameter))
        return chunk._replace(start=(chunk.start + numel // parameter.device_mesh[EXPERTS].size()) % numel)

    return _chunk(wrong)


def padding_counted() -> AbstractContextManager[None]:
    """The last block of a parameter as long as the others."""

    def wrong(state: Any, name: str, original: Callable[..., Any]) -> Any:
        chunk = original(state, name)
        rows, *rest = state._parameters[name].shape
        block = -(-rows // state._shards) * _numel(tuple(rest))
        return chunk._replace(numel=block) if chunk.numel else chunk

    return _chunk(wrong)


@contextmanager
def layers_counted_within_the_stage() -> Iterator[None]:
    """The names of a later stage begin anew with the first layer."""
    from elastic.engines.fsdp2 import state as fsdp2_state

    original = fsdp2_state.named_parameters

    def local(model: Any) -> Any:
        found = list(original(model))
        numbers = sorted({int(number) for name, _ in found for number in re.findall(r"^layers\.(\d+)\.", name)})
        for name, parameter in found:
            renamed = re.sub(r"^layers\.(\d+)", lambda m: f"layers.{numbers.index(int(m[1]))}", name)
            yield renamed, parameter

    with mock.patch.object(fsdp2_state, "named_parameters", local):
        yield


BUGS: Mapping[str, Bug] = {
    "experts of the next rank": experts_of_the_next_rank,
    "experts in reverse": experts_in_reverse,
    "experts counted over lanes": experts_counted_over_lanes,
    "experts of one lane in reverse": experts_of_one_lane_in_reverse,
    "slices of the other rank": slices_of_the_other_rank,
    "slices of the other lane": slices_of_the_other_lane,
    "elements one further": elements_one_further,
    "boxes transposed": boxes_transposed,
    "slices of nearly even widths": slices_of_nearly_even_widths,
    "moments of another kind": moments_of_another_kind,
    "blocks in reverse": blocks_in_reverse,
    "rows of the next experts": rows_of_the_next_experts,
    "padding counted": padding_counted,
    "layers counted within the stage": layers_counted_within_the_stage,
}
