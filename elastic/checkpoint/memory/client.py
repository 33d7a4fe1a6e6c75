"""A worker's hand in its node's memory: one rank's snapshots, one generation after the other."""

from __future__ import annotations

import logging
import mmap
import os
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from elastic.checkpoint.memory.channel import IO_LIMIT_S, Message, checked
from elastic.checkpoint.memory.lines import Mark
from elastic.checkpoint.memory.records import check_template, client_state, template_to_json
from elastic.checkpoint.memory.segments import map_segment
from elastic.checkpoint.memory.shelf import READER_LIMIT_S
from elastic.checkpoint.memory.wire import Address, connect
from elastic.core.errors import StorageError, UsageError
from elastic.core.manifest import Json, ShardRecord

logger = logging.getLogger(__name__)

_IDLE_S = 30.0
# The server itself waits for a reader at most so long before it answers.
_ANSWER_LIMIT_S = READER_LIMIT_S + IO_LIMIT_S


class NodeMemory:
    """Connects to the server of this node. Thread-safe, except that one thread at a time writes snapshots.

    Every call raises StorageError when the server cannot be reached, after at most half a minute if it is frozen;
    there is no way back then but a new object. Fenced: a newer generation has begun on this node.
    """

    def __init__(self, local_name: str, token: bytes) -> None:
        try:
            self._channel = connect(local_name, token)
        except OSError as error:
            raise StorageError(f"this node's memory of snapshots cannot be reached: {error}") from error
        self._asking = threading.Lock()
        self._answers: queue.SimpleQueue[tuple[Message, int | None] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._broken: str | None = None
        self._progress: dict[str, Any] = {}
        self._generation = self._committed = self._settled = -1
        self._maps: dict[int, mmap.mmap] = {}
        self._listener = threading.Thread(target=self._listen, name="snapshots in memory", daemon=True)
        self._listener.start()

    def open(
        self,
        template: ShardRecord,
        nbytes: int,
        targets: Sequence[Address],
        base: Mark | None = None,
        stripe: Sequence[int] = (),
    ) -> None:
        """Once per generation, before its first snapshot.

        `template` is this rank's record with what is constant in the generation; `begin` of its tensors counts from
        the beginning of the segment of `nbytes`. `targets` get a replica of each snapshot, or with `stripe` (ranks,
        this one among them) keep the parity of their shards. `base` is the
        (generation, step) of the snapshot in memory from which this generation was restored, given once that was
        proven good: everything else that is older is given back then. Without it older generations stay until a
        snapshot of this one has settled.

        Raises UsageError when two copies of this shard do not fit into the node's memory beside what it holds for
        others.
        """
        if template.bytes != nbytes:
            raise UsageError(f"the record of a shard says {template.bytes} bytes, but {nbytes} were asked for")
        check_template(template)
        with self._changed:
            self._generation = template.generation
            self._committed = self._settled = -1
            self._progress = {}
        self._maps.clear()
        message = {
            "do": "open",
            "template": template_to_json(template),
            "targets": [*targets],
            "base": base,
            "stripe": [*stripe],
        }
        self._ask(message)

    def ready(self) -> bool:
        """May `segment` be called? Not while the last snapshot is not known to have settled."""
        return self._committed <= self._settled

    def segment(self) -> memoryview:
        """Writable memory for the next snapshot. What it held is invalid from now on; it is never the settled one.

        Raises IntegrityError unless `ready`: the last snapshot may be what a recovery needs.
        """
        answer, fd = self._ask({"do": "begin"})
        number, nbytes = int(answer["number"]), int(answer["nbytes"])
        if fd is not None:
            try:
                self._maps[number] = map_segment(fd, nbytes)
            finally:
                os.close(fd)
        return memoryview(self._maps[number])[:nbytes]

    def commit(self, step: int, client: Mapping[str, Json] | None) -> None:
        """The segment holds step `step`. Returns at once; replication goes on without this process."""
        state = client_state(None if client is None else dict(client))
        self._ask({"do": "commit", "step": step, "client": state})
        self._committed = step

    def complete(self) -> int:
        """The newest step of this generation of which the own copy and all replicas are complete; -1 if none.

        Raises StorageError once the server is gone: nothing becomes complete any more.
        """
        with self._changed:
            if self._broken is not None:
                raise StorageError(self._broken)
            return int(self._progress.get("complete_step", -1))

    def wait_complete(self, step: int, timeout_s: float) -> bool:
        """False when the step was not complete in time, or will not be because the server is gone."""
        with self._changed:
            self._changed.wait_for(lambda: self._broken or self._progress.get("complete_step", -1) >= step, timeout_s)
            return bool(self._progress.get("complete_step", -1) >= step)

    def failed(self) -> str | None:
        """Why replication does not go on, in one sentence; None once it does again: it is tried until it works."""
        with self._changed:
            return self._broken or self._progress.get("failed")

    def settled(self, step: int) -> None:
        """Every rank's snapshot of `step` is complete: everything older on this node may go."""
        self._ask({"do": "settled", "step": step})
        self._settled = max(self._settled, step)

    def stats(self) -> dict[str, Any]:
        """`seconds` from commit to complete of the last snapshot, `sent_bytes` to replica holders since `open`."""
        with self._changed:
            return {key: self._progress.get(key, 0) for key in ("seconds", "sent_bytes")}

    def close(self) -> None:
        """What was committed stays with the node and is still sent. Idempotent."""
        self._break("it was closed")
        self._listener.join(IO_LIMIT_S)
        self._maps.clear()
        self._channel.close()

    def _ask(self, message: Message) -> tuple[Message, int | None]:
        with self._asking:
            if self._broken is None:
                try:
                    self._channel.send(message)
                    found = self._answers.get(timeout=_ANSWER_LIMIT_S)
                except OSError as error:
                    self._break(str(error))
                except queue.Empty:
                    self._break(f"it has not answered for {_ANSWER_LIMIT_S} s")
                else:
                    if found is not None:
                        return checked(found[0]), found[1]
            raise StorageError(f"this node's memory of snapshots is gone: {self._broken}")

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
            self._break(str(error))
        finally:
            self._answers.put(None)

    def _hear(self, progress: Mapping[str, Any]) -> None:
        with self._changed:
            # What was on its way when a new generation was opened is not about that one.
            if progress["generation"] == self._generation:
                self._progress = dict(progress)
                self._changed.notify_all()

    def _break(self, reason: str) -> None:
        with self._changed:
            if self._broken is None:
                self._broken = f"this node's memory of snapshots cannot be reached: {reason}"
            self._changed.notify_all()
        self._channel.shut()
