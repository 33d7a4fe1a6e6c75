"""An export as DeepSpeed's universal checkpoint (version 0.4): weights and optimizer state, one file for each tensor.

    latest_universal                                  the tag
    <tag>/zero/<parameter>/fp32.pt, exp_avg.pt, ...   {"param": the whole tensor, "cat_dim": 0}
                          /step.pt                    the optimizer's step count
    <tag>/zero/optimizer_state.pt                     hyper-parameters
    <tag>/mp_rank_00_model_states.pt                  counters, scheduler; frozen parameters and buffers
    <tag>/zero_pp_rank_0_mp_rank_00_model_states.pt   the same: the name that stage 3 looks for

Read in deepspeed 0.19.8: `checkpoint/universal_checkpoint.py` (stages 1, 2), `runtime/zero/stage3.py` (3665-3800). Its
loader restores neither frozen parameters nor buffers; they are in the model states all the same, for other readers.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

import torch

from elastic.core.errors import UsageError
from elastic.engines.json_values import decode
from elastic.engines.live_state import MASTER
from elastic.engines.optimizer.state import decode_scalars
from elastic.interchange.output_folder import OutputFolder
from elastic.interchange.tensors import CheckpointTensors
from elastic.interchange.torch_file import LazyTensor, save

_VERSION = 0.4
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_MODEL_STATES = "mp_rank_00_model_states.pt"


def write_universal(source: CheckpointTensors, output: OutputFolder) -> None:
    """Raises UsageError where the checkpoint has no trained parameter."""
    trained = [info.name for info in source.tensors.values() if info.kind == MASTER]
    if not trained:
        raise UsageError(f"checkpoint {source.manifest.id} has no trained parameter for a universal checkpoint")
    tag = source.manifest.id
    extra: Mapping[str, Any] = source.manifest.extra_state
    scalars = decode_scalars(extra["optimizer"]["scalars"])
    for name in trained:
        _write_parameter(source, output, f"{tag}/zero/{name}", name, scalars.get(name, {}))
    first = scalars.get(trained[0], {})
    torch.save(_optimizer(source, extra, first), output.path(f"{tag}/zero/optimizer_state.pt"))
    states = output.path(f"{tag}/{_MODEL_STATES}")
    save(_model_states(source, extra), states)
    shutil.copyfile(states, output.path(f"{tag}/zero_pp_rank_0_{_MODEL_STATES}"))
    output.write("latest_universal", tag)


def _write_parameter(
    source: CheckpointTensors, output: OutputFolder, folder: str, name: str, scalars: Mapping[str, Any]
) -> None:
    def write(kind: str, file: str) -> None:
        # Always float32: DeepSpeed copies it into its fp32 masters.
        torch.save({"param": source.read(name, kind).float(), "cat_dim": 0}, output.path(f"{folder}/{file}.pt"))

    write(MASTER, "fp32")
    for kind in source.state_kinds(name):
        write(kind, kind)
    if "step" in scalars:
        torch.save(decode(scalars["step"]), output.path(f"{folder}/step.pt"))


def _optimizer(source: CheckpointTensors, extra: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, Any]:
    groups = [
        {**decode(group["hyper"]), "params": [number]} for number, group in enumerate(extra["optimizer"]["groups"])
    ]
    state = {key: decode(value) for key, value in first.items()}
    return {
        "ds_version": source.manifest.versions.get("deepspeed", "0.19.8"),
        "param_groups": groups,
        # Stage 3 takes the step count from here.
        "optimizer_state_dict": {"state": {0: state}, "param_groups": groups},
    }


def _model_states(source: CheckpointTensors, extra: Mapping[str, Any]) -> dict[str, Any]:
    others = [info for info in source.tensors.values() if info.kind != MASTER]
    module = {
        info.name: LazyTensor(info.name, info.shape, info.dtype, lambda name=info.name: source.read(name))  # type: ignore[misc]
        for info in others
    }
    scheduler = extra.get("scheduler")
    return {
        "module": module,
        "lr_scheduler": decode(scheduler["state"]) if scheduler else None,
        **{name: int(extra["engine"][name]) for name in _COUNTERS},
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": source.manifest.versions.get("deepspeed", "0.19.8"),
        "universal_checkpoint_info": {"universal_checkpoint_version": _VERSION},
    }
