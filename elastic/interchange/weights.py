"""Where the weights come from that a run begins with: one interface over the formats of a folder."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch

from elastic.checkpoint.digest import digest
from elastic.checkpoint.folder import open_folder
from elastic.checkpoint.safetensors_header import FileTensor, header_length, read_header
from elastic.checkpoint.shards import DTYPE_NAMES, bytes_of
from elastic.core.errors import IntegrityError, ModelMismatch, UsageError
from elastic.core.settings import WeightsSettings
from elastic.interchange.tensors import CheckpointTensors
from elastic.store.address import local_root
from elastic.store.objects import Objects
from elastic.store.open import open_objects

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
# How many names an error lists.
_LISTED = 5


class Weights(Protocol):
    """Tensors by name, read in parts. Every rank opens its own."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str, start: int, numel: int) -> torch.Tensor:
        """The elements [start, start + numel) of the flattened tensor, on the CPU, in the stored dtype."""
        ...


def open_weights(settings: WeightsSettings) -> Weights:
    """The weights in a folder, whatever format they have there.

    A run or checkpoint of this package; safetensors, one file or several; DeepSpeed's universal or native checkpoint; a
    torch file of a state_dict. Raises UsageError where there is none of these, or where a pickle is not allowed.
    """
    names = open_objects(settings.source).names("")
    if "manifest.json" in names or "checkpoints" in names:
        return CheckpointWeights(CheckpointTensors(*open_folder(settings.source)))
    if any(name.endswith(".safetensors") for name in names):
        return SafetensorsWeights(open_objects(settings.source), names)
    root = local_root(settings.source)
    if root is None:
        raise UsageError(
            f"{settings.source} holds no safetensors and no checkpoint of ray-elastic; other formats are read from a "
            "local or mounted folder only"
        )
    # Imported late: most runs need nothing of it.
    from elastic.interchange.pickled import open_pickled

    return open_pickled(root, names, settings.allow_pickle)


def match_names(
    wanted: Mapping[str, tuple[int, ...]],
    aliases: Mapping[str, str],
    optional: Iterable[str],
    found: Mapping[str, tuple[int, ...]],
    settings: WeightsSettings,
) -> dict[str, str]:
    """Which tensor of the source each of the model's is: name -> name there.

    `wanted` are the model's names and shapes, `aliases` further names of its shared tensors; `optional` need not be
    there. Raises ModelMismatch naming what is missing, unexpected or of another shape, unless patterns allow it.
    """
    others: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        others.setdefault(name, []).append(alias)
    names: dict[str, str] = {}
    missing: list[str] = []
    free = set(optional)
    for name, shape in wanted.items():
        there = next((one for one in (name, *others.get(name, ())) if one in found), None)
        if there is None:
            if name not in free and not _allowed(name, settings.allow_missing):
                missing.append(name)
        elif tuple(found[there]) != tuple(shape):
            raise ModelMismatch(
                f"{there!r} has shape {tuple(found[there])} in {settings.source}, the model's has {tuple(shape)}"
            )
        else:
            names[name] = there
    known = set(wanted) | set(aliases) | free
    unexpected = [name for name in found if name not in known and not _allowed(name, settings.allow_unexpected)]
    if missing or unexpected:
        raise ModelMismatch(_differences(settings.source, missing, unexpected))
    return names


class SafetensorsWeights:
    """The safetensors files of a folder, on any storage: exactly the bytes that are asked for are read.

    With an index (`model.safetensors.index.json`) its files; else `model.safetensors`; else the one file that is there.
    """

    def __init__(self, objects: Objects, names: Sequence[str]) -> None:
        self._objects = objects
        self._tensors: dict[str, tuple[str, FileTensor]] = {}
        for file in _files(objects, names):
            for name, tensor in self._header(file).items():
                if name in self._tensors:
                    raise IntegrityError(f"{name!r} is in {self._tensors[name][0]} and in {file}")
                self._tensors[name] = (file, tensor)
        self.shapes = {name: tensor.shape for name, (_, tensor) in self._tensors.items()}

    def read(self, name: str, start: int, numel: int) -> torch.Tensor:
        file, tensor = self._tensors[name]
        if tensor.dtype not in _DTYPES:
            raise UsageError(f"{name!r} in {file} has the dtype {tensor.dtype}, which torch has not")
        found = torch.empty(numel, dtype=_DTYPES[tensor.dtype])
        if numel:
            self._objects.read_into(file, tensor.begin + start * found.element_size(), [bytes_of(found)])
        return found

    def _header(self, file: str) -> dict[str, FileTensor]:
        first = bytearray(8)
        self._objects.read_into(file, 0, [memoryview(first)])
        text = bytearray(header_length(bytes(first), file))
        self._objects.read_into(file, 8, [memoryview(text)])
        return read_header(bytes(text), file)


class CheckpointWeights:
    """A checkpoint of another run, of any world size, ZeRO stage and mesh. Shared tensors have all their names.

    `stored` are the pieces that the checkpoint has of its tensors, whole ones or slices, by their keys in the manifest:
    (number of elements, digest). `read_so_far` is what this rank has read of one.
    """

    def __init__(self, source: CheckpointTensors) -> None:
        self._source = source
        self.shapes = {name: info.shape for name, info in source.tensors.items()}
        self.shapes |= {alias: self.shapes[name] for alias, name in source.aliases.items()}
        self.stored: dict[str, tuple[int, int]] = {
            key: (numel, source.manifest.digests[key])
            for name in source.tensors
            for key, numel in source.slices(name).values()
            if numel
        }
        self._read: dict[str, tuple[int, int]] = {}

    def read(self, name: str, start: int, numel: int) -> torch.Tensor:
        stored = self._source.aliases.get(name, name)
        info = self._source.tensors[stored]
        found, keys = torch.empty(numel, dtype=info.dtype), self._source.slices(stored)

        def seen(lane: int, first: int, elements: torch.Tensor) -> None:
            key, _ = keys[lane]
            total, count = self._read.get(key, (0, 0))
            partial = digest(elements, f"{info.kind}/{stored}", first)
            self._read[key] = ((total + partial) % 2**64, count + elements.numel())

        self._source.read_into(stored, start, found, seen=seen)
        return found

    def read_so_far(self, key: str) -> tuple[int, int]:
        """The sum of the partial digests modulo 2**64, and the number of elements."""
        return self._read.get(key, (0, 0))


def _files(objects: Objects, names: Sequence[str]) -> list[str]:
    files = [name for name in names if name.endswith(".safetensors")]
    index = next((name for name in names if name.endswith(".safetensors.index.json")), None)
    if index is not None:
        try:
            listed = sorted(set(json.loads(objects.get(index))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise IntegrityError(f"{index} is not the index of safetensors files: {error!r}") from error
        absent = [name for name in listed if name not in files]
        if absent:
            raise IntegrityError(f"{index} names {absent[0]!r}, which is not in the folder")
        return listed
    if "model.safetensors" in files:
        return ["model.safetensors"]
    if len(files) > 1:
        raise UsageError(f"there are {len(files)} safetensors files and no index; which of them are the model's?")
    return files


def _allowed(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _differences(source: str, missing: Sequence[str], unexpected: Sequence[str]) -> str:
    parts = []
    if missing:
        parts.append(
            f"it lacks {_some(missing)} (allow_missing takes patterns of names that may keep their own values)"
        )
    if unexpected:
        parts.append(
            f"it has {_some(unexpected)}, which the model has not (allow_unexpected takes patterns to leave out)"
        )
    return f"the weights in {source} do not fit the model: {'; '.join(parts)}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(repr(name) for name in names[:_LISTED]) + more
