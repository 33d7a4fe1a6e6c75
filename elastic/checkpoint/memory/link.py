"""One connection of a worker to its node's server, and the thread that hears what comes over it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from elastic.checkpoint.memory.server.segment_pool import READER_LIMIT_S
from elastic.transport.channel import IO_LIMIT_S, Channel, Message

_IDLE_S = 30.0
# The server itself waits for a reader at most so long before it answers.
_ANSWER_LIMIT_S = READER_LIMIT_S + IO_LIMIT_S

Answer = tuple[Message, int | None]


class Link:
    """Of no use any more once `broken` says why. One thread at a time asks.

    On the thread that listens: `hear` is called with what the server tells by itself, `lost` once, at the end.
    """

    def __init__(
        self, channel: Channel, hear: Callable[[Mapping[str, Any]], None], lost: Callable[[Link], None]
    ) -> None:
        self.broken: str | None = None
        self._channel = channel
        self._hear = hear
        self._lost = lost
        self._answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, name="snapshots in memory", daemon=True)
        self._listener.start()

    def ask(self, message: Message) -> Answer | None:
        """The answer and the descriptor that came with it; None where the connection broke before they came."""
        if self.broken is not None:
            return None
        try:
            self._channel.send(message)
            return self._answers.get(timeout=_ANSWER_LIMIT_S)
        except OSError as error:
            self.end(str(error))
        except queue.Empty:
            self.end(f"it has not answered for {_ANSWER_LIMIT_S} s")
        return None

    def end(self, reason: str) -> None:
        """From any thread: whoever waits here stops waiting. The first reason is the one that counts."""
        self.broken = self.broken or reason
        self._channel.shut()

    def release(self) -> None:
        """From `lost`, when nobody asks."""
        self._channel.close()

    def join(self) -> None:
        """After `end`, not from the thread that listens."""
        self._listener.join(IO_LIMIT_S)

    def _listen(self) -> None:
        try:
            while True:
                while self._channel.idle(_IDLE_S):
                    pass
                message, fd = self._channel.receive()
                if "answer" in message:
                    self._answers.put((message["answer"], fd))
                else:
                    self._hear(message["progress"])
        except (OSError, KeyError) as error:
            self.end(str(error))
        finally:
            self._answers.put(None)
        self._lost(self)
