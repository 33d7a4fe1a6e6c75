"""Exit codes that can be trusted: 0 only when the run reached its end."""

from __future__ import annotations

from elastic.core.run import phase

NOT_FINISHED = 101
NOT_FOUND = 102
STOPPED = 103
NO_CAPACITY = 105

_CODES = {
    phase.FINISHED: 0,
    phase.USAGE: 2,
    phase.USER_CODE_FAILED: 100,
    phase.NOT_FINISHED: NOT_FINISHED,
    phase.STOPPED: STOPPED,
    phase.GAVE_UP: 104,
    phase.NO_CAPACITY: NO_CAPACITY,
    phase.INTEGRITY: 106,
}

# The outcomes of a run.
STATUSES = frozenset(_CODES)
# The exit codes of a driver whose run has ended or could not begin. Other codes say nothing about the run.
FINAL_CODES = frozenset({*_CODES.values(), NOT_FOUND})
# EX_TEMPFAIL of sysexits.h: a driver that has lost its run and does not know its state.
DRIVER_LOST = 75
# EX_UNAVAILABLE: a driver that found no controller and could not read the run's state in storage. The run may have
# reached its end, so 101 would be a guess.
DRIVER_BLIND = 69

TABLE = """exit codes:
  0 the run reached its end   2 usage           100 user code failed   101 not finished
  102 not found               103 stopped       104 gave up            105 no capacity
  106 integrity"""


def exit_code(status: object) -> int:
    """The exit code of a run's status; an unknown status counts as not finished."""
    return _CODES.get(str(status), NOT_FINISHED)


def status_of(code: int) -> str:
    """The inverse of `exit_code`."""
    return next((status for status, known in _CODES.items() if known == code), phase.NOT_FINISHED)
