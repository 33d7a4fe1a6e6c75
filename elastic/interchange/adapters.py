"""Adapters of PEFT as its own loaders read them: alone, without the model that they were trained on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from elastic.core.errors import UsageError
from elastic.engines.live_state import MASTER
from elastic.interchange.hugging_face import texts_of
from elastic.interchange.output_folder import OutputFolder
from elastic.interchange.safetensors_files import write_safetensors
from elastic.interchange.state_dict import ExportedState
from elastic.interchange.tensors import CheckpointTensors

# PEFT reads the adapter of this name from the folder itself, and others from folders of their names in it.
_DEFAULT = "default"


def adapters_of(source: CheckpointTensors) -> Mapping[str, Mapping[str, Any]]:
    """By name `config` and `weights`, see `elastic.engines.model.description`; empty where the model has none.

    Raises UsageError where they cannot be written, and where they are not all that was trained.
    """
    said = source.model.get("adapters") or {}
    what = f"checkpoint {source.manifest.id} is of a model with adapters of PEFT ({', '.join(said)})"
    instead = (
        "write them with trainer.save_model() or model.save_pretrained(DIR) at the end of the training function, or "
        "export --to safetensors"
    )
    # Older checkpoints have a list of names.
    if said and (not isinstance(said, Mapping) or None in said.values()):
        raise UsageError(f"{what}, and does not say which tensors are theirs: {instead}")
    held = {name for adapter in said.values() for name in adapter["weights"].values()}
    left = [name for name, info in source.tensors.items() if info.kind == MASTER and name not in held]
    if said and left:
        raise UsageError(f"{what}, and {left[0]!r} ({len(left)} in all), which was trained, is none of them: {instead}")
    return dict(said)


def write_adapters(
    source: CheckpointTensors,
    adapters: Mapping[str, Mapping[str, Any]],
    dtype: torch.dtype | None,
    output: OutputFolder,
    config: str | os.PathLike[str] | None,
    max_file_bytes: int,
) -> None:
    """`adapter_model.safetensors` and `adapter_config.json` of each; the tokenizer's files of the folder `config`."""
    for name, adapter in adapters.items():
        state = ExportedState(source, dtype, names=adapter["weights"])
        folder = "" if name == _DEFAULT else f"{name}/"
        size = sum(info.bytes for info in state.tensors.values())
        if size > max_file_bytes:
            raise UsageError(
                f"the adapter {name} has {size} bytes, and PEFT reads one file: give max_file_bytes (--max-file-mb) at "
                "least as many"
            )
        write_safetensors(state, output, max_file_bytes, f"{folder}adapter_model")
        output.write(f"{folder}adapter_config.json", json.dumps(adapter["config"], indent=2, sort_keys=True))
    for name, text in ({} if config is None else texts_of(Path(config))).items():
        # Those of a whole model are not in this folder.
        if name != "config.json":
            output.write(name, text)
