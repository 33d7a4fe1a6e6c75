"""How a fenced controller ends: never by Ray's word for an id that its successor has by now."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from elastic.runtime.controller import exits


class Ended(BaseException):
    pass


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []

    def leave(code: int) -> Any:
        told.append(f"process {code}")
        raise Ended

    monkeypatch.setattr(exits.os, "_exit", leave)
    monkeypatch.setattr(exits, "end_actor", lambda: told.append("actor"))
    monkeypatch.setattr(exits.logging, "shutdown", lambda: None)
    return told


@pytest.mark.parametrize("doubt", [False, True])
def test_a_fenced_controller_ends_its_own_process_only(
    ends: list[str], monkeypatch: pytest.MonkeyPatch, doubt: bool
) -> None:
    def replaced() -> bool:
        if doubt:
            raise ConnectionError("the control store is away")
        return False

    monkeypatch.setattr(exits, "is_current", replaced)
    with pytest.raises(Ended):
        asyncio.run(exits.end_fenced())
    assert ends == ["process 0"]


def test_a_controller_that_another_actor_has_fenced_is_not_restarted(
    ends: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exits, "is_current", lambda: True)
    asyncio.run(exits.end_fenced())
    assert ends == ["actor"]


@pytest.mark.parametrize(
    ("known", "current"),
    [
        ({"Address": {"NodeID": "n"}, "Pid": 7, "State": "ALIVE"}, True),
        ({"Address": {"NodeID": "other"}, "Pid": 7, "State": "ALIVE"}, False),
        ({"Address": {"NodeID": "n"}, "Pid": 8, "State": "ALIVE"}, False),
        ({"Address": {"NodeID": "n"}, "Pid": 7, "State": "RESTARTING"}, False),
        ({}, False),
    ],
)
def test_the_control_store_says_which_process_the_actor_is(
    known: dict[str, Any], current: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Context:
        def get_actor_id(self) -> str:
            return "a"

        def get_node_id(self) -> str:
            return "n"

    monkeypatch.setattr(exits.ray, "get_runtime_context", Context)
    monkeypatch.setattr(exits.ray._private.state, "actors", lambda actor: known if actor == "a" else {})
    monkeypatch.setattr(exits.os, "getpid", lambda: 7)
    assert exits.is_current() is current
