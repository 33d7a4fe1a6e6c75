"""The base optimizer's state: tensors with the master's shape, scalars, and what has other shapes; classified, read and
installed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from elastic.core.checkpoint.manifest import Json
from elastic.core.errors import ModelMismatch, UsageError
from elastic.engines.json_values import decode, encode
from elastic.engines.live_state import MASTER, Master, ShardedState
from elastic.engines.optimizer.other_shapes import is_other, put_together, stored_name, taken_apart

# Parameter-group keys that choose an implementation: a property of the machine, not of the training state.
_IMPLEMENTATION = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})


@dataclass(frozen=True)
class MasterState:
    """`tensors` have as many elements as the master; `scalars` are single numbers, as 0-d tensors or Python values, and
    values with places for the tensors in `others`, which have other shapes and are whole."""

    tensors: Mapping[str, torch.Tensor]
    scalars: Mapping[str, Any]
    others: Mapping[str, torch.Tensor] = field(default_factory=dict)


def read_states(base: torch.optim.Optimizer, masters: list[Master]) -> list[MasterState]:
    """One entry per master; live tensors, not copies. Raises UsageError naming the optimizer and the state."""
    # `get`, for the state is a defaultdict: looking must not create what does not exist yet.
    with torch.no_grad():
        raw = [base.state.get(master.key) or {} for master in masters]
        others = [_others(base, master, state) for master, state in zip(masters, raw, strict=True)]
        raw = [
            _local({key: value for key, value in state.items() if key not in other})
            for state, other in zip(raw, others, strict=True)
        ]
    # The state of a 0-d parameter looks like a scalar: the other parameters' state decides.
    shaped = {
        key
        for master, state in zip(masters, raw, strict=True)
        for key, value in state.items()
        if _is_shaped(value) and value.numel() == master.tensor.numel()
    }
    found = []
    for master, state, other in zip(masters, raw, others, strict=True):
        split = _split(base, master, state, shaped)
        told, tensors = _apart(other)
        split = MasterState(split.tensors, {**split.scalars, **told}, tensors)
        found.append(split)
    return found


def others_of(masters: Iterable[Master], states: Iterable[MasterState]) -> dict[str, torch.Tensor]:
    """What has other shapes, of all masters, by the names that it has in a snapshot."""
    return {
        stored_name(master.names[0], path): tensor
        for master, state in zip(masters, states, strict=True)
        for path, tensor in state.others.items()
    }


def encode_scalars(masters: list[Master], states: list[MasterState]) -> Json:
    """Scalars by parameter name, names with equal ones together: [{"names": [...], "values": {...}}]."""
    # Grouped by their JSON text: linear where ten thousand parameters all have different scalars.
    found: dict[str, tuple[Json, list[str]]] = {}
    for master, state in zip(masters, states, strict=True):
        if not state.tensors and not state.scalars:
            continue
        values = {key: encode(value, f"optimizer state {key!r}") for key, value in state.scalars.items()}
        _, names = found.setdefault(json.dumps(values, sort_keys=True), (values, []))
        names += master.names
    return [{"names": names, "values": values} for values, names in found.values()]


def decode_scalars(scalars: Json) -> dict[str, Json]:
    """Name -> its scalars, still as JSON. A name that is missing had no state at all."""
    return {name: entry["values"] for entry in scalars for name in entry["names"]}


def scalars_of(master: Master, by_name: Mapping[str, Json]) -> Json | None:
    """The scalars for all of a master's parameters; None where none of them had state.

    Raises ModelMismatch where parameters that share a flat here had different scalars: one flat has one step count.
    """
    first: tuple[str, Json] | None = None
    for name in master.names:
        if name not in by_name:
            continue
        if first is not None and by_name[name] != first[1]:
            raise ModelMismatch(
                f"parameters {first[0]!r} and {name!r} have different optimizer scalars in the checkpoint "
                f"({first[1]} and {by_name[name]}), and this configuration keeps them in one flat tensor with one set"
            )
        first = first or (name, by_name[name])
    return first[1] if first else None


def install_state(
    base: torch.optim.Optimizer,
    master: Master,
    tensors: Mapping[str, torch.Tensor],
    scalars: Mapping[str, Json] | None,
    others: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Make the base optimizer's state of `master` exactly this; nothing at all, as before a first step, if it is empty.

    Tensors are written in place where they exist (others may hold them); where they do not, `tensors` are taken over if
    they lie with the master, and copied if not. Every scalar is a new object: a step tensor shared by two groups would
    be counted up twice per step. `others`: by their names in a snapshot, 1-D.
    """
    if not tensors and not scalars:
        base.state.pop(master.key, None)
        return
    state = base.state[master.key]
    wanted = set(tensors) | set(scalars or {})
    for key in [key for key in state if key not in wanted]:
        del state[key]
    for key, tensor in tensors.items():
        _put(state, key, tensor, master)

    def other(path: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        found = (others or {}).get(stored_name(master.names[0], path), torch.empty(0))
        # Without elements it is in no snapshot.
        return found.to(master.tensor.device, dtype, copy=True).view(shape)

    for key, value in (scalars or {}).items():
        if isinstance(told := decode(value), (dict, list, tuple)):
            state[key] = put_together(told, other)
            continue
        state[key] = _scalar(decode(value), state.get(key), base.param_groups[master.group], master.tensor)


def read_groups(state: ShardedState) -> Json:
    """Hyper-parameters by parameter group, with the names of the group's members."""
    return [
        {
            "names": names,
            "hyper": {
                key: encode(value, f"parameter group {number}: {key}")
                for key, value in group.items()
                if key not in _IMPLEMENTATION
            },
        }
        for number, (names, group) in enumerate(zip(state.groups(), state.base.param_groups, strict=True))
    ]


def check_groups(state: ShardedState, stored: Json) -> None:
    """Raises ModelMismatch naming the first parameter that is in another group, or the number of groups."""
    live = state.groups()
    if len(live) != len(stored):
        raise ModelMismatch(f"the checkpoint has {len(stored)} parameter groups, this optimizer has {len(live)}")
    was = {name: number for number, group in enumerate(stored) for name in group["names"]}
    for number, names in enumerate(live):
        for name in names:
            if was.get(name) != number:
                raise ModelMismatch(f"parameter {name!r} is in group {number} here, in group {was.get(name)} there")


def install_groups(held: Iterable[Iterable[dict[str, Any]]], stored: Json) -> None:
    """Write hyper-parameters into the existing dicts of every holder: schedulers and users reference those."""
    seen: set[int] = set()
    for groups in held:
        for group, entry in zip(groups, stored, strict=False):
            if id(group) not in seen:
                seen.add(id(group))
                for key, value in entry["hyper"].items():
                    group[key] = _hyper(group.get(key), decode(value))


def not_elementwise(base: Any, numel: int, key: str, value: Any) -> str:
    """Why this state of a tensor of `numel` elements cannot be carried: a sentence for an error."""
    what = f"{value.numel()} elements" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
    return (
        f"optimizer {type(base).__name__} keeps {key!r} as {what} for a tensor of {numel} elements; "
        "only state with one value per weight, or one number, can be moved to another world size, and tensors of other "
        "shapes where each parameter is stepped whole (ZeRO stage 0 with a master for each, engine: fsdp2)"
    )


def _others(base: Any, master: Master, state: Mapping[Any, Any]) -> dict[str, Any]:
    """What has another shape than the parameter, where it may have. Raises UsageError where the optimizer's key cannot
    be a part of a name."""
    if not master.others:
        return {}
    # Where the parameter is sharded, what has its shape is, too.
    like = master.tensor if master.wrapper is None else None
    found = {key: value for key, value in state.items() if not hasattr(value, "to_local") and is_other(value, like)}
    for key in found:
        _require_name(base, key)
    return found


def _apart(other: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Values with places, and the tensors by their paths. Raises UsageError where two have the same."""
    told, tensors = dict[str, Any](), dict[str, torch.Tensor]()
    for key, value in other.items():
        told[key], found = taken_apart(key, value)
        if both := sorted(tensors.keys() & found.keys()):
            raise UsageError(f"an optimizer keeps two tensors of a parameter under {both[0]!r}: give them other keys")
        tensors |= found
    return told, tensors


def _require_name(base: Any, key: Any) -> None:
    if not isinstance(key, str) or "/" in key or key == MASTER:
        raise UsageError(f"optimizer {type(base).__name__} keeps state under {key!r}, which cannot be a tensor's name")


def _split(base: Any, master: Master, state: Mapping[str, Any], shaped: set[str]) -> MasterState:
    tensors: dict[str, torch.Tensor] = {}
    scalars: dict[str, Any] = {}
    for key, value in state.items():
        _require_name(base, key)
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor and value.numel() == master.tensor.numel() and (_is_shaped(value) or key in shaped):
            tensors[key] = value
        elif (is_tensor and value.numel() == 1) or value is None or isinstance(value, (bool, int, float, str)):
            scalars[key] = value
        else:
            raise UsageError(not_elementwise(base, master.tensor.numel(), key, value))
    return MasterState(tensors, scalars)


def _is_shaped(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _local(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Tensors as this rank holds them: the local part of a DTensor, which shares its memory."""
    return {key: value.to_local() if hasattr(value, "to_local") else value for key, value in state.items()}


def _put(state: Any, key: str, value: torch.Tensor, master: Master) -> None:
    live = _local(state).get(key)
    if isinstance(live, torch.Tensor) and live.numel() == value.numel() and live.dtype == value.dtype:
        live.detach().copy_(value.view(live.shape))
    else:
        state[key] = master.wrapped(value.to(device=master.tensor.device).view(master.tensor.shape))


def _scalar(value: Any, live: Any, group: Mapping[str, Any], master: torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(live, torch.Tensor):
        return value.to(live.device)
    # torch keeps step counts on the host unless the step itself runs on the device.
    on_device = bool(group.get("capturable") or group.get("fused"))
    return value.to(master.device) if on_device else value


def _hyper(live: Any, value: Any) -> Any:
    """A tensor learning rate is captured by compiled steps: it is filled, not replaced."""
    if isinstance(live, torch.Tensor):
        return live.fill_(float(value))
    return value
