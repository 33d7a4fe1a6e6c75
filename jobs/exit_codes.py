"""Exit codes that can be trusted: 0 only when the run reached its end."""

from __future__ import annotations

from elastic.core import state

NOT_FINISHED = 101
NOT_FOUND = 102

_CODES = {
    state.FINISHED: 0,
    state.USAGE: 2,
    state.USER_CODE_FAILED: 100,
    state.NOT_FINISHED: NOT_FINISHED,
    state.STOPPED: 103,
    state.GAVE_UP: 104,
    state.NO_CAPACITY: 105,
    state.INTEGRITY: 106,
}

TABLE = """exit codes:
  0 the run reached its end   2 usage           100 user code failed   101 not finished
  102 not found               103 stopped       104 gave up            105 no capacity
  106 integrity"""


def exit_code(status: object) -> int:
    """Of a run's status; whatever is not known has not finished."""
    return _CODES.get(str(status), NOT_FINISHED)
