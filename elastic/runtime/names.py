"""How actors and placement groups of a run are called, so that a restarted controller finds them again."""

from __future__ import annotations

NAMESPACE = "elastic"


def controller(run_id: str) -> str:
    return f"elastic:{run_id}:controller"


def worker(run_id: str, worker_id: int) -> str:
    return f"elastic:{run_id}:worker:{worker_id}"


def agent(run_id: str, node: str) -> str:
    return f"elastic:{run_id}:agent:{node}"


def slot(run_id: str, slot_id: int, attempt: int) -> str:
    """`attempt` keeps a resumed run's slots apart from those of the attempt before."""
    return f"elastic:{run_id}:slot:{attempt}:{slot_id}"
