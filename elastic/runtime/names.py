"""Names of a run's actors and placement groups, by which a restarted controller finds them again.

An attempt is one start of a run; resuming it makes another. Names contain the attempt's number, so that leftovers of an
earlier attempt are never mistaken for parts of this one.
"""

from __future__ import annotations

from collections.abc import Iterable

NAMESPACE = "elastic"


def controller(run_id: str) -> str:
    return f"elastic:{run_id}:controller"


def supervisor(run_id: str) -> str:
    """Not one of the run's parts: it outlives the controller and ends by itself after the last driver."""
    return f"elastic:{run_id}:supervisor"


def is_controller(name: str) -> bool:
    return name.startswith("elastic:") and name.endswith(":controller")


def parts(run_id: str) -> str:
    """The common prefix of the names of all parts of a run except its controller."""
    return f"elastic:{run_id}:attempt:"


def worker(run_id: str, attempt: int, worker_id: int) -> str:
    return f"{parts(run_id)}{attempt}:worker:{worker_id}"


def agent(run_id: str, attempt: int, node: str) -> str:
    return f"{parts(run_id)}{attempt}:agent:{node}"


def slot(run_id: str, attempt: int, slot_id: int) -> str:
    return f"{parts(run_id)}{attempt}:slot:{slot_id}"


def next_slot(run_id: str, attempt: int, found: Iterable[str]) -> int:
    """One above the highest slot number of the attempt among these names; 0 without any."""
    return _above(slot(run_id, attempt, 0)[:-1], found)


def next_worker(run_id: str, attempt: int, found: Iterable[str]) -> int:
    return _above(worker(run_id, attempt, 0)[:-1], found)


def _above(prefix: str, found: Iterable[str]) -> int:
    numbers = (name.removeprefix(prefix) for name in found if name.startswith(prefix))
    return max((int(number) + 1 for number in numbers if number.isdecimal()), default=0)
