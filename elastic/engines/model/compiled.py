"""What torch.compile makes in this process, and what it may take for constant."""

from __future__ import annotations

import sys
from types import ModuleType

import torch.distributed as dist

from elastic.engines.when_imported import when_imported

_FOLDED_IN = "torch._dynamo.variables.torch"
_compiles = False


def compiles() -> bool:
    """Has this process called torch.compile, or compiled a module? Each call names its backend in torch's table, which
    has a nameless entry from the start; torch's reset empties it, and what was compiled before compiles again."""
    global _compiles
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    _compiles = _compiles or (dynamo is not None and any(backend for backend in dynamo.cached_backends.values()))
    return _compiles


def graphs() -> int:
    """How many torch.compile has made here."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(utils.counters["stats"]["unique_graphs"])


def guard_ranks() -> None:
    """Graphs that ask for their rank or for the world size are made anew where the answer is another one.

    torch writes the answer into the graph as a constant, for good: right where a process has one group for life. Here a
    loss divided by the world size would stay divided by that of an earlier generation. Of other such constants torch
    keeps a list of those that it asks for again before it uses the graph.
    """
    when_imported(_FOLDED_IN, _guard)


def _guard(module: ModuleType) -> None:
    for asked in (dist.is_initialized, dist.get_rank, dist.get_world_size):
        module.constant_fold_functions_need_guards[asked] = None
