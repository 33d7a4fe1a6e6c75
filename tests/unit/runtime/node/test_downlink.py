"""What an agent makes of a command for its workers and for other nodes': who is waited for, and for how long.

How the controller uses it: tests/unit/runtime/controller/test_commands.py.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from elastic.core.errors import Fenced
from elastic.runtime.messages import Command, Handed, Part
from elastic.runtime.node.downlink import Downlink

LIMIT_S = 20.0
COMMAND = Command(1, "end", (3, "over"), 1e6)


def worker(answer: Any) -> Any:
    async def command(*_: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        if answer is frozen:
            await asyncio.Event().wait()
        return answer

    return SimpleNamespace(handed=SimpleNamespace(remote=command))


frozen = object()


def handed_on(downlink: Downlink, parts: dict[str, Part], command: Command = COMMAND) -> Handed:
    return asyncio.run(asyncio.wait_for(downlink.hand_on(command, parts), LIMIT_S))


def made(node: str) -> Downlink:
    async def itself(*question: Any) -> Any:
        return (node, *question)

    return Downlink(node, lambda incarnation: None, itself)


def test_each_worker_s_answer_is_told_and_nobody_waits_for_one_that_gives_none() -> None:
    downlink = made("n0")
    died, cut = ray.exceptions.ActorDiedError(), ray.exceptions.ActorUnavailableError("reset", None)
    answers = [frozen, died, cut, Fenced("replaced"), None]
    downlink.workers = dict(enumerate(map(worker, answers)))
    handed = handed_on(downlink, {"n0": Part(None, dict.fromkeys(range(6), ()))}, COMMAND._replace(patience_s=0.5))
    assert handed.answers == {4: None}
    assert handed.refused == {3: "Fenced: replaced"}
    assert handed.died.keys() == {1}
    assert handed.receivers == {1, 3, 4}
    assert (downlink.handed_on, downlink.passed_down) == (1, 0)


def test_what_other_agents_answer_is_told_and_an_unknown_one_is_asked_for_again() -> None:
    leaf, relay = made("n1"), made("n0")
    leaf.workers = {4: worker("left")}
    other = SimpleNamespace(hand_on=SimpleNamespace(remote=leaf.hand_on))
    part = Part(None, {4: ()})
    assert handed_on(relay, {"n1": part}) == Handed({}, {}, {})
    for agent in (other, None):
        assert handed_on(relay, {"n1": part._replace(agent=agent)}).answers == {4: "left"}
    assert (relay.passed_down, relay.handed_on, leaf.handed_on) == (2, 0, 2)


def test_a_question_is_answered_by_the_agents_themselves() -> None:
    leaf, relay = made("n1"), made("n0")
    other = SimpleNamespace(hand_on=SimpleNamespace(remote=leaf.hand_on))
    handed = handed_on(relay, {"n0": Part(None, {"n0": (1,)}), "n1": Part(other, {"n1": (2,)})})
    assert handed.answers == {"n0": ("n0", "end", 3, "over", 1), "n1": ("n1", "end", 3, "over", 2)}
    assert (relay.answered, relay.passed_down, relay.handed_on) == (1, 0, 0)


def test_an_old_controller_is_refused() -> None:
    def heed(incarnation: int) -> None:
        raise Fenced(f"controller {incarnation} was replaced")

    with pytest.raises(Fenced, match="controller 1"):
        handed_on(Downlink("n0", heed, made("n0").hand_on), {"n0": Part(None, {})})
