"""First process of one node: `python node_init.py RAYLET ARGUMENT...` starts the raylet and adopts the node's orphans.

So the processes of a node are exactly those below this one: whatever a worker starts, in a session of its own, under
another name, with an empty environment, by a parent that is long gone. It ends when the last of them has ended.
Standard library only and run by its path, since there is one per node: 30 ms and 9 MB.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(beside: Callable[[int], None] | None = None) -> int:
    """`beside` is called with the raylet's pid: it may start another process of the node."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
    own = os.getpid()
    raylet = os.fork()
    if raylet == 0:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != own:  # It died before the kernel was asked to watch it.
            os._exit(1)
        os.execv(sys.argv[1], sys.argv[1:])
    if beside is not None:
        beside(raylet)
    code = 1
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            return code
        if pid == raylet:
            code = os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main() & 0xFF)
