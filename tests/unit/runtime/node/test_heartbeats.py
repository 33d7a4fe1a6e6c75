"""The agent's mailbox: who can send to it, and what a dead agent leaves behind."""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
import tempfile
from pathlib import Path

import pytest

from elastic.runtime.node.heartbeats import open_mailbox, receive


def send(path: str, worker: int) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(json.dumps({"worker": worker}).encode(), path)


def test_the_mailbox_is_in_a_folder_that_nobody_else_can_enter(tmp_path: Path) -> None:
    box, name = open_mailbox(str(tmp_path))
    with box:
        assert stat.S_IMODE(os.stat(Path(name).parent).st_mode) == 0o700
        send(name, 3)
        assert receive(box) == [(os.getpid(), {"worker": 3})]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can take another user's place")
def test_another_user_cannot_fill_the_mailbox() -> None:
    # Not in pytest's own folder, which is private itself.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o777)
        box, name = open_mailbox(folder)
        with box:
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    os.setuid(65534)
                    send(name, 3)
                except PermissionError:
                    code = 0
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "another user has sent a datagram"
            assert receive(box) == []


def test_what_a_dead_agent_has_left_is_removed_and_a_living_one_is_not_touched(tmp_path: Path) -> None:
    dead, gone = open_mailbox(str(tmp_path))
    dead.close()
    living, kept = open_mailbox(str(tmp_path))
    assert not Path(gone).parent.exists()
    with living:
        box, _ = open_mailbox(str(tmp_path))
        box.close()
        send(kept, 1)
        assert receive(living) == [(os.getpid(), {"worker": 1})]


def test_a_temporary_folder_with_a_long_path_is_not_used(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    box, name = open_mailbox(str(deep))
    with box:
        assert name.startswith("/tmp/")
        assert len(name) < 108
        assert sys.platform == "linux"
    os.unlink(name)
    os.rmdir(Path(name).parent)
