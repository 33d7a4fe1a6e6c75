"""The live tensors of one rank, parameter by parameter: what verification compares the sharded state with.

It shares no way to them with `ZeroState`: in stages 1 and 2 a parameter's place is its address in the group's flat, in
stage 3 what DeepSpeed keeps of each parameter (`grad_position`, its own process group), and flats are the keys of the
base optimizer. Follows the same sources as `partitioned`, `replicated` and `stage3`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from elastic.engines.deepspeed.experts.placement import first_by_group
from elastic.engines.live_state import BUFFER, MASTER, PARAM, Fragment
from elastic.engines.model.plain_names import named_buffers, named_parameters
from elastic.engines.optimizer.other_shapes import without_tensors


@dataclass(frozen=True)
class _Place:
    """This rank's `numel` elements (0 or less: none) of a parameter from `start` on: in `master` from `offset` on, or
    in `kept` where it is frozen."""

    start: int
    numel: int
    master: torch.Tensor | None = None
    offset: int = 0
    kept: torch.Tensor | None = None


_Find = Callable[[Any], _Place]


def fragments(engine: Any, names: Collection[str] | None = None) -> Iterator[Fragment]:
    """Of the tensors in `names`, or of all: trained parameters with optimizer state, frozen ones, module buffers."""
    base, find = stepping(engine), _finder(engine)
    for name, parameter in named_parameters(engine.module):
        if names is None or name in names:
            place = find(parameter)
            if place.numel > 0:
                yield from _fragments(base, name, place)
    for name, buffer in named_buffers(engine.module):
        if buffer.numel() and (names is None or name in names):
            yield Fragment(BUFFER, name, 0, buffer.detach().reshape(-1))


def numbers(engine: Any, names: Collection[str] | None = None) -> Mapping[str, Mapping[str, Any]]:
    """What the optimizer keeps of each trained parameter besides tensors of its shape: name -> key -> value."""
    base, find = stepping(engine), _finder(engine)
    found = {}
    for name, parameter in named_parameters(engine.module):
        master = find(parameter).master if names is None or name in names else None
        if master is not None:
            kept = base.state.get(master) or {}
            found[name] = without_tensors({key: v for key, v in kept.items() if not _shaped(v, master)})
    return found


def stepping(engine: Any) -> Any:
    """The optimizer whose step changes the masters."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def _fragments(base: Any, name: str, place: _Place) -> Iterator[Fragment]:
    master = place.master
    if master is None:
        assert place.kept is not None
        yield Fragment(PARAM, name, place.start, place.kept.detach().reshape(-1)[: place.numel])
        return
    span = slice(place.offset, place.offset + place.numel)
    yield Fragment(MASTER, name, place.start, master.detach().reshape(-1)[span])
    for kind, value in (base.state.get(master) or {}).items():
        if _shaped(value, master):
            yield Fragment(kind, name, place.start, value.detach().reshape(-1)[span])


def _shaped(value: Any, master: torch.Tensor) -> bool:
    if not isinstance(value, torch.Tensor) or not value.dim() or value.numel() != master.numel():
        return False
    # Of a matrix that is not cut, what has as many elements may be something else.
    return value.shape == master.shape or master.dim() == 1 or value.numel() == 1


def _finder(engine: Any) -> _Find:
    wrapper, lanes = engine.optimizer, max(engine.autotp_size(), 1)
    match int(engine.zero_optimization_stage()):
        case 3:
            return lambda parameter: _in_sub_group(wrapper, parameter, lanes)
        case 1 | 2:
            flats = wrapper.bf16_groups_flat if hasattr(wrapper, "bf16_groups_flat") else wrapper.bit16_groups_flat
            return lambda parameter: _in_flat(wrapper, flats, parameter, lanes)
        case _:
            whole = _whole_masters(wrapper, lanes)
            return lambda parameter: whole.get(id(parameter)) or _frozen(parameter)


def _in_flat(wrapper: Any, flats: Any, parameter: Any, lanes: int) -> _Place:
    at = parameter.data_ptr()
    for number, flat in enumerate(flats):
        begin, rest = divmod(at - flat.data_ptr(), flat.element_size())
        if rest or not 0 <= begin < flat.numel() or parameter.dtype != flat.dtype or not parameter.numel():
            continue
        group = wrapper.real_dp_process_group[number]
        part = flat.numel() // dist.get_world_size(group)
        first = part * dist.get_rank(group)
        low, high = max(begin, first), min(begin + parameter.numel(), first + part)
        start = first_by_group(parameter, lanes) + low - begin
        return _Place(start, high - low, wrapper.optimizer.param_groups[number]["params"][0], low - first)
    return _frozen(parameter)


def _in_sub_group(wrapper: Any, parameter: Any, lanes: int) -> _Place:
    count = int(parameter.ds_tensor.ds_numel)
    start = dist.get_rank(parameter.ds_process_group) * count
    numel = min(count, int(parameter.ds_numel) - start)
    start += first_by_group(parameter, lanes)
    place = wrapper.grad_position.get(wrapper.get_param_id(parameter)) if parameter.requires_grad else None
    if place is None:
        return _Place(start, numel, kept=parameter.ds_tensor.data)
    sub_group, offset, _ = place
    return _Place(start, numel, wrapper.fp32_partitioned_groups_flat[sub_group], offset)


def _whole_masters(wrapper: Any, lanes: int) -> dict[int, _Place]:
    """By id of the trained parameter."""
    found = {}
    for number, group in enumerate(getattr(wrapper, "optimizer", wrapper).param_groups):
        if hasattr(wrapper, "fp32_groups_flat"):
            end = 0
            for parameter in wrapper.fp16_groups[number]:
                begin, end = end, end + parameter.numel()
                found[id(parameter)] = _Place(0, parameter.numel(), group["params"][0], begin)
        else:
            own = wrapper.fp16_groups[number] if hasattr(wrapper, "fp32_groups") else group["params"]
            for parameter, master in zip(own, group["params"], strict=True):
                if parameter.requires_grad:
                    found[id(parameter)] = _Place(first_by_group(parameter, lanes), parameter.numel(), master)
    return found


def _frozen(parameter: Any) -> _Place:
    return _Place(0, parameter.numel(), kept=parameter.data)
