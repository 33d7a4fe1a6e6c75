"""An export as safetensors: one file, or several with the index that Hugging Face's loaders read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain

import torch

from elastic.checkpoint.safetensors_header import FileTensor, in_file_order, make_header
from elastic.checkpoint.shards import DTYPE_NAMES, bytes_of, check_dtype
from elastic.interchange.output_folder import OutputFolder
from elastic.interchange.state_dict import ExportedState
from elastic.interchange.tensors import TensorInfo
from elastic.store.objects import Objects

# What transformers needs to see before it takes a file for torch's.
_METADATA = {"format": "pt"}


def write_safetensors(
    state: ExportedState, output: OutputFolder, max_file_bytes: int, stem: str = "model"
) -> list[str]:
    """`model.safetensors` (`stem` in the place of "model"), or `model-00001-of-0000N.safetensors` and the index;
    returns the files' names.

    Tensors that share memory are stored once, as the format demands; their other names are in the file's metadata,
    where `safetensors.torch.load_model` and `save_model` keep them.
    """
    parts = _parts(state.tensors.values(), max_file_bytes)
    files = _file_names(stem, len(parts))
    for file, part in zip(files, parts, strict=True):
        held = {info.name for info in part}
        aliases = {alias: name for alias, name in state.aliases.items() if name in held}
        _write_file(state, part, {**_METADATA, **aliases}, output, file)
    if len(parts) > 1:
        weight_map = {info.name: file for file, part in zip(files, parts, strict=True) for info in part}
        total = sum(info.bytes for info in state.tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        output.write_json(f"{stem}.safetensors.index.json", index)
    return files


def put_safetensors(objects: Objects, path: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """One object with these, in host memory and contiguous. It is durable when this returns, and whole or not there.

    Raises UsageError for a dtype that the format has not, and what `Objects.put` raises."""
    for name, tensor in tensors.items():
        check_dtype(name, tensor.dtype)
    files = in_file_order(
        FileTensor(name, DTYPE_NAMES[each.dtype], tuple(each.shape)) for name, each in tensors.items()
    )
    header, placed = make_header(files, _METADATA)
    objects.put(path, chain([header], (bytes_of(tensors[each.name].reshape(-1)) for each in placed)))


def _write_file(
    state: ExportedState, part: Iterable[TensorInfo], metadata: Mapping[str, str], output: OutputFolder, file: str
) -> None:
    tensors = in_file_order(FileTensor(info.name, DTYPE_NAMES[info.dtype], info.shape) for info in part)
    header, placed = make_header(tensors, metadata)
    with open(output.path(file), "wb", buffering=0) as written:
        _write_all(written, memoryview(header))
        for tensor in placed:
            values = state.read(tensor.name)
            _write_all(written, bytes_of(values.reshape(-1)))


def _write_all(file: object, data: memoryview) -> None:
    """A system call writes 2 GiB at most."""
    while len(data):
        data = data[file.write(data[: 1 << 30]) :]  # type: ignore[attr-defined]


def _parts(tensors: Iterable[TensorInfo], max_file_bytes: int) -> list[list[TensorInfo]]:
    """In the model's order, as many to a file as fit; a tensor that is larger has a file of its own."""
    parts: list[list[TensorInfo]] = [[]]
    size = 0
    for info in tensors:
        if parts[-1] and size + info.bytes > max_file_bytes:
            parts.append([])
            size = 0
        parts[-1].append(info)
        size += info.bytes
    return parts


def _file_names(stem: str, count: int) -> list[str]:
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
