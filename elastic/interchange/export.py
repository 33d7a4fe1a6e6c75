"""`elastic.export`: a checkpoint as files that other libraries load."""

from __future__ import annotations

import logging
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from elastic.checkpoint.folder import open_folder
from elastic.core.errors import UsageError
from elastic.interchange.adapters import adapters_of, write_adapters
from elastic.interchange.distributed import write_dcp
from elastic.interchange.hugging_face import hugging_face_prefix, write_configuration
from elastic.interchange.output_folder import OutputFolder, output_folder
from elastic.interchange.safetensors_files import write_safetensors
from elastic.interchange.state_dict import ExportedState, export_dtype
from elastic.interchange.tensors import CheckpointTensors, TensorInfo
from elastic.interchange.torch_file import LazyTensor, save
from elastic.interchange.universal import write_universal

logger = logging.getLogger(__name__)

Format = Literal["safetensors", "hf", "torch", "dcp", "deepspeed-universal"]
FORMATS: tuple[str, ...] = get_args(Format)
MAX_FILE_BYTES = 5 * 10**9


def export(
    checkpoint: Any,
    directory: str | os.PathLike[str],
    *,
    to: Format = "safetensors",
    dtype: str | torch.dtype | None = None,
    overwrite: bool = False,
    max_file_bytes: int = MAX_FILE_BYTES,
    config: str | os.PathLike[str] | None = None,
) -> Path:
    """Write the weights of a checkpoint into a new folder, in the format of another library; returns the folder.

    `checkpoint` is a Ray Train Checkpoint, or the path or URL of a checkpoint's folder or of a run's (its newest one).
    The weights are those that the optimizer updates, fp32 where mixed precision keeps them so; `dtype` casts
    floating-point tensors. `max_file_bytes` and `config` (the folder of a Hugging Face model: its configuration and
    tokenizer) belong to "safetensors" and "hf". Of a model with adapters of PEFT "hf" writes these alone. One tensor is
    in memory at a time, and each is verified by its digest.

    Raises UsageError before anything is written, IntegrityError for a damaged checkpoint, StorageError.
    """
    if to not in FORMATS:
        raise UsageError(f"there is no export to {to!r}; the formats are {', '.join(FORMATS)}")
    if max_file_bytes < 1:
        raise UsageError(f"max_file_bytes must be at least 1, not {max_file_bytes}")
    if config is not None and to != "hf":
        raise UsageError(f"config belongs to an export to hf, not to {to}")
    if to == "deepspeed-universal" and dtype is not None:
        raise UsageError("a universal checkpoint is always float32: leave the dtype out")
    cast = export_dtype(dtype)
    folder, manifest = open_folder(address_of(checkpoint))
    source = CheckpointTensors(folder, manifest)
    adapters = adapters_of(source) if to == "hf" else {}
    state = ExportedState(source, cast, hugging_face_prefix(source) if to == "hf" else "")
    about: dict[str, Any] = {
        "made_by": f"ray-elastic {version('ray-elastic')}",
        "format": to,
        "run": manifest.run_id,
        "checkpoint": manifest.id,
        "step": manifest.step,
        "dtype": str(cast).removeprefix("torch.") if cast else "as stored",
    }
    if source.registered:
        about["left_out"] = source.registered
    with output_folder(directory, about, overwrite) as output:
        if adapters:
            write_adapters(source, adapters, cast, output, config, max_file_bytes)
        else:
            if to == "hf":
                write_configuration(source, state, output, config)
            _write(to, source, state, output, max_file_bytes)
    if source.registered:
        logger.warning(
            "only the model is exported; what elastic.state.register has kept is not: %s", ", ".join(source.registered)
        )
    return Path(os.path.abspath(Path(directory).expanduser()))


def address_of(checkpoint: Any) -> str:
    """The address of a checkpoint: itself where it is one, and where a Ray Train Checkpoint lies. Raises UsageError."""
    path, filesystem = getattr(checkpoint, "path", None), getattr(checkpoint, "filesystem", None)
    # Before it is taken for a path: Ray's Checkpoint has the method of one, to refuse it.
    if filesystem is None and isinstance(checkpoint, (str, os.PathLike)):
        return str(os.path.expanduser(checkpoint))
    if not isinstance(path, str) or filesystem is None:
        raise UsageError(f"a checkpoint is a path, a URL or a Ray Train Checkpoint, not a {type(checkpoint).__name__}")
    kind = getattr(filesystem, "type_name", "local")
    return path if kind == "local" or "://" in path else f"{kind}://{path}"


def _write(
    to: Format, source: CheckpointTensors, state: ExportedState, output: OutputFolder, max_file_bytes: int
) -> None:
    match to:
        case "safetensors" | "hf":
            write_safetensors(state, output, max_file_bytes)
        case "torch":
            save(_lazy_state_dict(state), output.path("model.pt"))
        case "dcp":
            write_dcp(state, output.root)
        case "deepspeed-universal":
            write_universal(source, output)


def _lazy_state_dict(state: ExportedState) -> dict[str, LazyTensor]:
    def lazy(info: TensorInfo) -> LazyTensor:
        return LazyTensor(info.name, info.shape, info.dtype, lambda: state.read(info.name))

    found = {name: lazy(info) for name, info in state.tensors.items()}
    return found | {alias: found[name] for alias, name in state.aliases.items()}
