"""Weights from files of `torch.save`: DeepSpeed's native and universal checkpoints, and a plain state_dict.

A pickle can run code when it is read, so files are read with torch's restricted unpickler (`weights_only=True`), which
builds tensors and plain values and refuses everything else by name. DeepSpeed's own files also hold a few of its
classes. With `allow_pickle` these are read as inert objects: nothing of DeepSpeed is imported or called.

Tensors are mapped (`mmap`), so that a rank reads only its parts. The layouts are those of deepspeed 0.19.8
(`utils/zero_to_fp32.py`, `runtime/zero/stage_1_and_2.py`, `stage3.py`).
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elastic.core.errors import IntegrityError, UsageError

_FLAG = "allow_pickle (`--allow-pickle` on the command line)"


class _Inert:
    """Stands in for an object of DeepSpeed's: keeps what was pickled, does nothing."""


# What DeepSpeed's own state holds besides tensors and plain values.
_STAND_INS: tuple[tuple[Any, str], ...] = (
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_Inert, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Inert, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Inert, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_Inert, "deepspeed.checkpoint.universal_checkpoint.SubparamShape"),
)


@dataclass(frozen=True)
class Part:
    """The elements [start, start + numel) of a tensor are those of `flat` from `offset` on."""

    start: int
    numel: int
    flat: torch.Tensor
    offset: int


class PickledWeights:
    """`elastic.interchange.weights.Weights` over mapped files."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], parts: Mapping[str, Sequence[Part]]) -> None:
        """Raises IntegrityError where the parts of a tensor do not hold each of its elements exactly once."""
        self.shapes = dict(shapes)
        self.parts = dict(parts)
        for name, shape in self.shapes.items():
            reached = 0
            for part in sorted(parts[name], key=lambda part: part.start):
                fits = part.start == reached and part.offset + part.numel <= part.flat.numel()
                if not fits:
                    raise IntegrityError(f"the files hold {name!r} from element {reached} on incompletely or twice")
                reached += part.numel
            if reached != torch.Size(shape).numel():
                raise IntegrityError(f"the files hold {reached} elements of {name!r}, its shape {shape} has others")

    def read(self, name: str, start: int, numel: int) -> torch.Tensor:
        parts = self.parts[name]
        dtype = parts[0].flat.dtype if parts else torch.float32
        found = torch.empty(numel, dtype=dtype)
        for part in parts:
            low, high = max(start, part.start), min(start + numel, part.start + part.numel)
            if low < high:
                begin = part.offset + low - part.start
                found[low - start : high - start] = part.flat[begin : begin + high - low]
        return found


def open_pickled(root: str, names: Sequence[str], allow_pickle: bool) -> PickledWeights:
    """The weights in a folder of torch's files. Raises UsageError where it is none, or `allow_pickle` is needed."""
    folder = Path(root)
    if "latest_universal" in names or "zero" in names:
        return _universal(_tagged(folder, "latest_universal"), allow_pickle)
    if "latest" in names or any(name.endswith("_model_states.pt") for name in names):
        return _native(_tagged(folder, "latest"), allow_pickle)
    plain = [name for name in names if name in ("model.pt", "pytorch_model.bin", "model.bin", "model.pth")]
    if len(plain) == 1:
        state = load(folder / plain[0], False)
        if not isinstance(state, Mapping) or not all(isinstance(value, torch.Tensor) for value in state.values()):
            raise UsageError(f"{folder / plain[0]} is not a state_dict: names and tensors alone")
        return _whole(state)
    raise UsageError(
        f"{root} holds no weights that can be read: safetensors, a run or checkpoint of ray-elastic, a DeepSpeed "
        "checkpoint (latest, latest_universal), or model.pt"
    )


def load(path: Path, allow_pickle: bool) -> Any:
    """One file of torch.save, tensors mapped. Raises UsageError for what is no tensor and no plain value."""
    stand_ins: list[Any] = list(_STAND_INS) if allow_pickle else []
    try:
        with torch.serialization.safe_globals(stand_ins):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        hint = "" if allow_pickle else f"; if the file is DeepSpeed's own and you trust it, {_FLAG} reads its classes"
        raise UsageError(f"{path} holds more than tensors and plain values{hint}: {_short(error)}") from error
    except (OSError, RuntimeError, EOFError) as error:
        raise IntegrityError(f"{path} cannot be read as a file of torch.save: {_short(error)}") from error


def _tagged(folder: Path, pointer: str) -> Path:
    """The folder of the tag that `pointer` names; the folder itself where it is a tag's."""
    if not (folder / pointer).is_file():
        return folder
    tag = (folder / pointer).read_text().strip()
    if not tag or "/" in tag or tag in (".", "..") or not (folder / tag).is_dir():
        raise IntegrityError(f"{folder / pointer} names {tag[:80]!r}, which is not a folder there")
    return folder / tag


def _universal(tag: Path, allow_pickle: bool) -> PickledWeights:
    shapes: dict[str, tuple[int, ...]] = {}
    parts: dict[str, Sequence[Part]] = {}
    states = [_states(path, allow_pickle) for path in sorted(tag.glob("*_model_states.pt"))[:1]]
    trained = _shapes_of(states[0]) if states else {}
    for file in sorted(tag.glob("zero/**/fp32.pt")):
        name = str(file.parent.relative_to(tag / "zero"))
        value = load(file, allow_pickle)
        tensor = value["param"] if isinstance(value, Mapping) else value
        # Made from stage 3 it is flat, and the shape is in the model states.
        shapes[name] = trained.get(name, tuple(tensor.shape))
        parts[name] = [Part(0, tensor.numel(), tensor.reshape(-1), 0)]
    if not shapes:
        raise UsageError(f"{tag} is not a universal checkpoint: it has no zero/<parameter>/fp32.pt")
    for state in states:
        rest = {name: tensor for name, tensor in state["module"].items() if name not in shapes and _has_values(tensor)}
        whole = _whole(rest)
        shapes |= {name: shape for name, shape in whole.shapes.items() if name not in _shared(state)}
        parts |= whole.parts
    return PickledWeights(shapes, parts)


def _native(tag: Path, allow_pickle: bool) -> PickledWeights:
    if not allow_pickle:
        raise UsageError(
            f"{tag} is a checkpoint of DeepSpeed, made of pickles: {_FLAG} reads it with a restricted unpickler that "
            "builds tensors and plain values, and refuses everything else by name"
        )
    optimizer = sorted(tag.glob("*_optim_states.pt"))
    models = sorted(tag.glob("*_model_states.pt"))
    if not models or any("mp_rank_00" not in path.name for path in models):
        raise UsageError(f"{tag} holds no checkpoint of a data-parallel DeepSpeed run (mp_rank_00_model_states.pt)")
    states = [_states(path, True) for path in models]
    if not optimizer:
        return _whole({name: tensor for name, tensor in states[0]["module"].items() if _has_values(tensor)})
    ranks = [load(path, True)["optimizer_state_dict"] for path in optimizer]
    ordered = _by_rank(optimizer, ranks)
    stage = int(ordered[0]["zero_stage"])
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    count = ordered[0]["partition_count"]
    world = max(count) if isinstance(count, list) else int(count)
    if world != len(ordered):
        raise IntegrityError(f"{tag} was written by {world} ranks, but holds the files of {len(ordered)}")
    flats = [list(rank[key]) for rank in ordered]
    shapes, parts = _trained3(states[0], flats) if stage == 3 else _trained12(ordered[0], states[0], flats)
    if stage == 3:
        model_ranks = _by_rank(models, states)
        frozen = _frozen3(model_ranks)
        shapes |= frozen[0]
        parts |= frozen[1]
    buffers = set(states[0].get("buffer_names") or ())
    rest = {
        name: tensor
        for name, tensor in states[0]["module"].items()
        if name not in shapes and _has_values(tensor) and (stage < 3 or name in buffers)
    }
    whole = _whole({name: tensor for name, tensor in rest.items() if name not in _shared(states[0])})
    return PickledWeights(shapes | whole.shapes, parts | whole.parts)


_Found = tuple[dict[str, tuple[int, ...]], dict[str, Sequence[Part]]]


def _trained12(
    optimizer: Mapping[str, Any], state: Mapping[str, Any], flats: Sequence[Sequence[torch.Tensor]]
) -> _Found:
    """Stages 1 and 2: the ranks' partitions of a group, one after the other, are the group's parameters in order."""
    shapes: dict[str, tuple[int, ...]] = {}
    parts: dict[str, Sequence[Part]] = {}
    paddings = optimizer.get("param_alignment_paddings")
    for number, group in enumerate(state["param_shapes"]):
        at = 0
        for index, (name, shape) in enumerate(group.items()):
            shapes[name] = tuple(shape)
            numel = torch.Size(shape).numel()
            parts[name] = list(_cut(at, numel, [rank[number].reshape(-1) for rank in flats]))
            at += numel + (paddings[number][index] if paddings is not None else 0)
    return shapes, parts


def _cut(at: int, numel: int, partitions: Sequence[torch.Tensor]) -> Iterator[Part]:
    """The parts of what lies at [at, at + numel) of the partitions laid end to end."""
    begin = 0
    for partition in partitions:
        low, high = max(at, begin), min(at + numel, begin + partition.numel())
        if low < high:
            yield Part(low - at, high - low, partition, low - begin)
        begin += partition.numel()


def _trained3(state: Mapping[str, Any], flats: Sequence[Sequence[torch.Tensor]]) -> _Found:
    """Stage 3: each parameter is cut into equal parts, and each rank's parts lie end to end in its sub-groups."""
    shapes: dict[str, tuple[int, ...]] = {}
    parts: dict[str, Sequence[Part]] = {}
    at, world = 0, len(flats)
    for group in state["param_shapes"]:
        for name, shape in group.items():
            shapes[name] = tuple(shape)
            numel = torch.Size(shape).numel()
            part = -(-numel // world)
            parts[name] = [
                Part(rank * part + piece.start, piece.numel, piece.flat, piece.offset)
                for rank in range(world)
                for piece in _cut(
                    at, max(0, min(part, numel - rank * part)), [flat.reshape(-1) for flat in flats[rank]]
                )
            ]
            at += part
    return shapes, parts


def _frozen3(states: Sequence[Mapping[str, Any]]) -> _Found:
    shapes: dict[str, tuple[int, ...]] = {}
    parts: dict[str, Sequence[Part]] = {}
    for name, shape in (states[0].get("frozen_param_shapes") or {}).items():
        shapes[name] = tuple(shape)
        numel, found, reached = torch.Size(shape).numel(), [], 0
        for state in states:
            fragment = state["frozen_param_fragments"][name].reshape(-1)
            size = min(fragment.numel(), numel - reached)
            if size > 0:
                found.append(Part(reached, size, fragment, 0))
            reached += size
        parts[name] = found
    return shapes, parts


def _whole(state: Mapping[str, torch.Tensor]) -> PickledWeights:
    return PickledWeights(
        {name: tuple(tensor.shape) for name, tensor in state.items()},
        {
            name: [Part(0, tensor.numel(), tensor.reshape(-1), 0)] if tensor.numel() else []
            for name, tensor in state.items()
        },
    )


def _states(path: Path, allow_pickle: bool) -> Mapping[str, Any]:
    state = load(path, allow_pickle)
    if not isinstance(state, Mapping) or not isinstance(state.get("module"), Mapping):
        raise UsageError(f"{path} holds no model states of DeepSpeed")
    return state


def _shapes_of(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(shape) for group in state.get("param_shapes") or () for name, shape in group.items()}


def _shared(state: Mapping[str, Any]) -> set[str]:
    """Further names of shared tensors: the model has them too, under the name that the files hold."""
    return set(state.get("shared_params") or ())


def _has_values(tensor: Any) -> bool:
    """Stage 3 leaves empty tensors in the place of partitioned parameters."""
    return isinstance(tensor, torch.Tensor) and tensor.numel() > 0


def _by_rank(paths: Sequence[Path], values: Sequence[Any]) -> list[Any]:
    """In the order of the ranks: as text, rank 10 comes before rank 2."""

    def rank(path: Path) -> int:
        words = path.name.split("_")
        return int(words[words.index("rank") + 1])

    return [value for _, value in sorted(zip(map(rank, paths), values, strict=True), key=lambda pair: pair[0])]


def _short(error: Exception) -> str:
    """torch's explanation is a page long, and its advice is to switch the protection off."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = next((line for line in lines if "Unsupported" in line or "GLOBAL" in line), lines[0] if lines else "")
    return said[:300]
