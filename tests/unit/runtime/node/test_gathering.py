"""Parts of several callers as one message: when it is sent, and an answer for everybody, whatever happens to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import pytest

from elastic.runtime.node.gathering import Gathering

FOREVER_S = 1e6


class Receiver:
    """Answers 10 times the part, and nothing to those of whom it `takes` nothing."""

    def __init__(self, fails: Exception | None = None, refuses: str = "") -> None:
        self.got: list[dict[str, int]] = []
        self.fails, self.refuses = fails, refuses

    async def __call__(self, parts: dict[str, int]) -> Mapping[str, int]:
        self.got.append(parts)
        if self.fails is not None:
            raise self.fails
        return {key: 10 * part for key, part in parts.items() if key not in self.refuses}


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 20.0))


def test_callers_of_the_last_message_are_waited_for_and_nobody_else() -> None:
    async def scenario() -> None:
        receiver = Receiver(refuses="b")
        gathering: Gathering[str, int, int] = Gathering(receiver, 0.001)
        assert await asyncio.gather(gathering.deliver("a", 1), gathering.deliver("b", 2)) == [10, None]
        gathering._linger_s = FOREVER_S
        assert await asyncio.gather(gathering.deliver("a", 3), gathering.deliver("b", 4)) == [30, None]
        assert receiver.got == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]

    run(scenario)


def test_who_stays_away_is_not_waited_for_again() -> None:
    async def scenario() -> None:
        receiver = Receiver()
        gathering: Gathering[str, int, int] = Gathering(receiver, 0.001)
        await asyncio.gather(gathering.deliver("a", 1), gathering.deliver("b", 2))
        assert await gathering.deliver("a", 3) == 30
        gathering._linger_s = FOREVER_S
        assert await gathering.deliver("a", 4) == 40
        assert receiver.got[1:] == [{"a": 3}, {"a": 4}]

    run(scenario)


@pytest.mark.parametrize("error", [ConnectionError("it restarts"), TimeoutError()])
def test_a_receiver_that_does_not_answer_is_told_to_every_caller(error: Exception) -> None:
    async def scenario() -> None:
        gathering: Gathering[str, int, int] = Gathering(Receiver(error), FOREVER_S, lambda: "ab")
        assert await asyncio.gather(gathering.deliver("a", 1), gathering.deliver("b", 2)) == [None, None]

    run(scenario)


def test_a_caller_that_asks_again_has_given_up_the_first_time() -> None:
    async def scenario() -> None:
        receiver = Receiver()
        gathering: Gathering[str, int, int] = Gathering(receiver, FOREVER_S, lambda: "ab")
        first = asyncio.ensure_future(gathering.deliver("a", 1))
        await asyncio.sleep(0)
        again = asyncio.ensure_future(gathering.deliver("a", 2))
        assert await first is None
        await gathering.deliver("b", 3)
        assert await again == 20
        assert receiver.got == [{"a": 2, "b": 3}]

    run(scenario)
