"""The store of a process group asks nobody who they are, so it listens only where the run's nodes reach it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from elastic.comm import rendezvous


def _listens_at(port: int) -> list[str]:
    """Addresses as the kernel writes them (hex)."""
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            address, _, where = line.split()[1].partition(":")
            if line.split()[3] == "0A" and int(where, 16) == port:
                found.append(address)
    return found


def test_it_listens_at_the_nodes_own_address_only() -> None:
    hosted = rendezvous.host_store("127.0.0.1")
    assert _listens_at(hosted.port) == ["0100007F"]
    rendezvous.release_store(hosted)
    assert _listens_at(hosted.port) == []


def test_behind_a_forwarded_address_it_listens_everywhere_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        # Of a range that is nobody's (RFC 5737).
        assert rendezvous._listen("192.0.2.1", 0) is None
    assert "192.0.2.1 is not an address of this machine" in caplog.text
