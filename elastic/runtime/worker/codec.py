"""Translates the outcome of a worker's training into events of the state machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic.core import events as ev

if TYPE_CHECKING:
    from elastic.training.result import GenerationResult


def outcome(result: GenerationResult, generation: int, worker: int) -> ev.Event | None:
    """The event for the end of a generation on a worker; None when WorkerLeft is enough."""
    if result.kind == "finished":
        return ev.WorkerCompleted(generation, worker, result.step, result.completed)
    if result.kind == "collective_failed":
        peer = f" (rank {result.peer_rank})" if result.peer_rank is not None else ""
        return ev.CollectiveFailed(generation, worker, result.step, _first_line(result.message) + peer)
    if result.kind == "device_failed":
        # The other ranks wait for this one; its process is replaced after it has left.
        return ev.CollectiveFailed(generation, worker, result.step, f"its device failed: {_first_line(result.message)}")
    if result.kind == "anomaly" and result.bad_step is not None:
        bad = result.bad_step
        if bad.kind == "audit":
            told = (bad.suspects, bad.decided, bad.value, bad.agreed_step, bad.sound_step)
            return ev.AuditFailed(generation, worker, result.step, *told)
        return ev.AnomalyFound(generation, worker, result.step, bad.kind, bad.value, bad.positions)
    if result.kind in ("user_error", "usage_error"):
        error = result.message if result.kind == "usage_error" else f"{result.error_type}: {result.message}"
        usage = result.kind == "usage_error"
        return ev.UserCodeFailed(generation, worker, result.step, error, result.traceback or "", usage)
    if result.kind == "mesh_refused":
        return ev.MeshRefused(generation, worker, result.step, result.message)
    if result.kind == "restore_failed":
        # Unreachable storage says nothing about the checkpoint in it.
        away = (result.error_type or "").endswith(".StorageError")
        return ev.RestoreFailed(
            generation, worker, "" if away else result.checkpoint or "", _first_line(result.message)
        )
    return None


def _first_line(text: str) -> str:
    """The first line, without the advice that gloo appends to every error."""
    line = text.strip().splitlines()[0] if text.strip() else "no message"
    return line.partition(". This is typically caused by")[0][:500]
