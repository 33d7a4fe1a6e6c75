"""An export as a checkpoint of torch.distributed.checkpoint (DCP), written by DCP itself, one tensor at a time."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save

from elastic.interchange.state_dict import ExportedState


class _Planner(DefaultSavePlanner):
    """Plans with tensors that have no memory, and reads each when DCP writes it."""

    def __init__(self, state: ExportedState) -> None:
        super().__init__(flatten_state_dict=False)
        self._state = state

    def resolve_data(self, write_item: WriteItem) -> Any:
        name = write_item.index.fqn
        return self._state.read(self._state.aliases.get(name, name))


def write_dcp(state: ExportedState, folder: Path) -> None:
    """`dcp.load` reads the names as `model.state_dict()` has them: a shared tensor is there under each of its names."""
    shapes = {name: torch.empty(info.shape, dtype=info.dtype, device="meta") for name, info in state.tensors.items()}
    shapes |= {alias: shapes[name] for alias, name in state.aliases.items()}
    # A file for each tensor: DCP keeps all tensors of a file in memory until the file is complete.
    writer = FileSystemWriter(folder, single_file_per_rank=False, thread_count=1)
    with warnings.catch_warnings():
        # DCP says that one process saves alone, which is what is meant here.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(shapes, storage_writer=writer, planner=_Planner(state), no_dist=True)
