"""Gathers what several callers have for one receiver into one message, and gives each its part of the answer.

Nothing is kept here for anybody: a caller that gets None has to go another way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

_Key = TypeVar("_Key", bound=Hashable)
_Part = TypeVar("_Part")
_Answer = TypeVar("_Answer")


class Gathering(Generic[_Key, _Part, _Answer]):
    """`send` delivers what was gathered, and returns the answers of those whose parts were taken; an OSError or
    TimeoutError of it stands for none. It is sent once all `expected` callers have given their parts, or `linger_s`
    after the first has. Without `expected` those count that were in the last message.
    """

    def __init__(
        self,
        send: Callable[[dict[_Key, _Part]], Awaitable[Mapping[_Key, _Answer]]],
        linger_s: float,
        expected: Callable[[], Collection[_Key]] | None = None,
    ) -> None:
        self._send = send
        self._linger_s = linger_s
        self._last: Collection[_Key] = ()
        self._expected = expected or (lambda: self._last)
        self._waiting: dict[_Key, tuple[_Part, asyncio.Future[_Answer | None]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def deliver(self, key: _Key, part: _Part) -> _Answer | None:
        """The answer for `key`; None where its part was not taken."""
        if key in self._waiting:
            # It has given up waiting for the first answer.
            _answer(self._waiting.pop(key)[1], None)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[_Answer | None] = loop.create_future()
        self._waiting[key] = part, answer
        expected = self._expected()
        if expected and self._waiting.keys() >= set(expected):
            self._flush()
        elif self._timer is None:
            self._timer = loop.call_later(self._linger_s, self._flush)
        return await answer

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        batch, self._waiting, self._timer = self._waiting, {}, None
        self._last = batch.keys()
        task = asyncio.get_running_loop().create_task(self._pass_on(batch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, batch: dict[_Key, tuple[_Part, asyncio.Future[_Answer | None]]]) -> None:
        answers: Mapping[_Key, _Answer] = {}
        try:
            answers = await self._send({key: part for key, (part, _) in batch.items()})
        except (OSError, asyncio.TimeoutError) as error:
            logger.debug("the message of %d callers was not taken: %r", len(batch), error)
        finally:
            # Whatever was raised: nobody waits for an answer that does not come.
            for key, (_, answer) in batch.items():
                _answer(answer, answers.get(key))


def _answer(waiting: asyncio.Future[_Answer | None], answer: _Answer | None) -> None:
    if not waiting.done():
        waiting.set_result(answer)
