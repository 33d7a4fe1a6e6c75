"""Where a cluster's files are, and clearing away those of one whose keeper and starter were killed together."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import tempfile
from pathlib import Path

from elastic_cluster.local import processes
from elastic_cluster.local.node_table import TAG

logger = logging.getLogger(__name__)

_PREFIX = "elc-"
_LIMIT_S = 10.0


def _root() -> Path:
    # A socket path ends at 107 bytes, of which Ray's own part takes 80.
    root = tempfile.gettempdir()
    return Path(root if len(root) <= 8 else "/tmp")


def private_directory() -> Path:
    """A new directory that only this user can enter."""
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_root()))


def clear_remains(own: Path) -> None:
    """End the stopped processes and remove the directories of this user's clusters that no keeper answers for."""
    for directory in _root().glob(f"{_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):  # Another cluster may be ending just now.
            if directory != own and directory.stat().st_uid == os.getuid() and _dead(directory):
                _clear(directory)


def _clear(directory: Path) -> None:
    logger.warning("removing the leftovers of a cluster in %s", directory)
    with contextlib.suppress(TimeoutError):
        processes.kill_all(lambda: _members(directory), lambda: None, _LIMIT_S)
    shutil.rmtree(directory, ignore_errors=True)


def _dead(directory: Path) -> bool:
    """Refused, not absent: a keeper that has just started has no socket yet."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(directory / "keeper.sock"))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return False


def _members(directory: Path) -> list[processes.Process]:
    """Processes in the dead keeper's session that have a file of its private directory open, or carry its tag.

    Either alone would do but for two things: the number of a session is given again when all in it have ended, and
    Ray's processes write their title over their environment. A process that left the session is not found.
    """
    with contextlib.suppress(OSError, ValueError):
        session = int((directory / "session").read_text())
        found = [p for p in processes.table().values() if p.session == session and not p.zombie]
        return [p for p in found if _tagged(p.pid, directory.name) or _open_in(p.pid, directory)]
    return []


def _tagged(pid: int, cluster: str) -> bool:
    return processes.environment(pid).get(TAG, "").startswith(f"{cluster}/")


def _open_in(pid: int, directory: Path) -> bool:
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(entry.path).startswith(f"{directory}/"):
                    return True
    return False
