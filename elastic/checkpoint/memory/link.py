"""One connection of a worker to its node's server, and its receiving thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from elastic.checkpoint.memory.messages import READER_LIMIT_S, Progress, Request, from_json, request_to_json
from elastic.core.errors import IntegrityError
from elastic.transport.channel import IO_LIMIT_S, Channel, Message

_IDLE_S = 30.0
# Longer than the time for which the server itself waits for a reader before it answers.
_ANSWER_LIMIT_S = READER_LIMIT_S + IO_LIMIT_S

Answer = tuple[Message, int | None]


class Link:
    """Unusable once `broken` holds a reason. One thread at a time sends requests.

    On the receiving thread, `on_progress` is called with every report of the server, and `on_lost` once, at the end.
    """

    def __init__(
        self, channel: Channel, on_progress: Callable[[Progress], None], on_lost: Callable[[Link], None]
    ) -> None:
        self.broken: str | None = None
        self._channel = channel
        self._on_progress = on_progress
        self._on_lost = on_lost
        self._answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, name="snapshots in memory", daemon=True)
        self._listener.start()

    def ask(self, request: Request) -> Answer | None:
        """The answer and its descriptor; None if the connection broke before they arrived."""
        if self.broken is not None:
            return None
        try:
            self._channel.send(request_to_json(request))
            return self._answers.get(timeout=_ANSWER_LIMIT_S)
        except OSError as error:
            self.end(str(error))
        except queue.Empty:
            self.end(f"it has not answered for {_ANSWER_LIMIT_S} s")
        return None

    def end(self, reason: str) -> None:
        """From any thread: ends every wait on this connection. The first reason is kept."""
        self.broken = self.broken or reason
        self._channel.shut()

    def close(self) -> None:
        """From `on_lost`, while no request is in progress."""
        self._channel.close()

    def join(self) -> None:
        """After `end`, not from the receiving thread."""
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
                    self._on_progress(from_json(message["progress"], Progress))
        except (OSError, KeyError, IntegrityError) as error:
            self.end(str(error))
        finally:
            self._answers.put(None)
        self._on_lost(self)
