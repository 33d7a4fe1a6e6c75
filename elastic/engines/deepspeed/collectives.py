"""Counts DeepSpeed's collectives: every one goes through `deepspeed.comm.comm.cdb`, whose place a proxy takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from elastic.comm.collective_ledger import CollectiveLedger

# Operations in which a rank may wait for others. All others of the backend return at once.
_COLLECTIVES = frozenset(
    {
        "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_reduce",
        "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "broadcast", "broadcast_object_list",
        "gather", "inference_all_reduce", "monitored_barrier", "recv", "reduce", "reduce_scatter",
        "reduce_scatter_tensor", "scatter", "send",
    }
)  # fmt: skip


class CountedBackend:
    """Counts DeepSpeed's collectives from `install` to `remove`, which comes before the groups are destroyed."""

    def __init__(self) -> None:
        self._backend: Any = None

    def install(self, ledger: CollectiveLedger) -> None:
        from deepspeed.comm import comm

        if comm.cdb is not None:
            self._backend = comm.cdb
            comm.cdb = _Counted(comm.cdb, ledger)

    def remove(self) -> None:
        from deepspeed.comm import comm

        if self._backend is not None:
            comm.cdb, self._backend = self._backend, None


class _Counted:
    """DeepSpeed's communication backend with its collectives counted. Compiled code calls them between two graphs."""

    def __init__(self, backend: Any, ledger: CollectiveLedger) -> None:
        self._backend = backend
        for name in _COLLECTIVES:
            if hasattr(backend, name):
                setattr(self, name, _between_graphs(ledger.timed(name, getattr(backend, name))))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def _between_graphs(call: Callable[..., Any]) -> Any:
    # torch's types do not know it.
    return torch.compiler.disable(call, reason="collectives are counted")  # type: ignore[no-untyped-call]


@contextmanager
def muted() -> Iterator[None]:
    """In it DeepSpeed's reductions send nothing and leave every tensor as it is."""
    from deepspeed.comm import comm

    before, comm.cdb = comm.cdb, _Muted(comm.cdb)
    try:
        yield
    finally:
        comm.cdb = before


class _Muted:
    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return _nothing if name in ("all_reduce", "reduce") else getattr(self._backend, name)


def _nothing(*_: Any, **__: Any) -> None:
    return None
