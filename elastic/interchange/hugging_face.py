"""What `from_pretrained` needs next to the weights: the model's configuration. transformers itself is not needed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic.core.errors import UsageError
from elastic.interchange.output_folder import OutputFolder
from elastic.interchange.state_dict import ExportedState
from elastic.interchange.tensors import CheckpointTensors


def hugging_face_prefix(source: CheckpointTensors) -> str:
    """Where the Hugging Face model is in the trained module: "" for the module itself, else for example "lm."."""
    return str((source.model.get("hugging_face") or {}).get("prefix", ""))


def write_configuration(
    source: CheckpointTensors, state: ExportedState, output: OutputFolder, config: str | os.PathLike[str] | None
) -> None:
    """`config.json` and what else belongs to the model: from the checkpoint, or the files of the folder `config`.

    Files of `config` are copied whole (tokenizer, generation settings); its weights are not. Raises UsageError where
    neither has a configuration.
    """
    said: Mapping[str, Any] = source.model.get("hugging_face") or {}
    files: dict[str, str] = {}
    if said.get("config"):
        files["config.json"] = json.dumps(said["config"], indent=2)
    if said.get("generation_config"):
        files["generation_config.json"] = json.dumps(said["generation_config"], indent=2)
    if config is not None:
        files |= texts_of(Path(config))
    if "config.json" not in files:
        raise UsageError(
            f"checkpoint {source.manifest.id} does not say which Hugging Face model it is of: give the folder of the "
            "model that the training began from with --config, or export --to safetensors"
        )
    files["config.json"] = _with_dtype(files["config.json"], state)
    for name, text in files.items():
        output.write(name, text)


def texts_of(folder: Path) -> dict[str, str]:
    """The small text files of a model's folder."""
    if folder.is_file():
        return {"config.json": folder.read_text()}
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} holds no config.json")
    wanted = (".json", ".txt", ".model", ".jinja")
    return {
        path.name: path.read_text()
        for path in sorted(folder.iterdir())
        if path.suffix in wanted and path.is_file() and not path.name.endswith(".index.json")
    }


def _with_dtype(text: str, state: ExportedState) -> str:
    """The configuration says in which dtype a model is loaded: that of the exported weights."""
    config = json.loads(text)
    dtypes = {str(info.dtype).removeprefix("torch.") for info in state.tensors.values() if info.dtype.is_floating_point}
    if len(dtypes) == 1:
        config["dtype"] = dtypes.pop()
        config.pop("torch_dtype", None)
    return json.dumps(config, indent=2) + "\n"
