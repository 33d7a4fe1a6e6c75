"""A worker's hand in its node's memory: one rank's snapshots, one generation after the other."""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from elastic.checkpoint.memory.link import Answer, Link
from elastic.checkpoint.memory.records import check_template, client_state, template_to_json
from elastic.checkpoint.memory.segments import map_segment
from elastic.checkpoint.memory.shard_buffers import Mark
from elastic.core.checkpoint.manifest import Json, ShardRecord
from elastic.core.errors import ElasticError, StorageError, UsageError
from elastic.transport.channel import Message, checked
from elastic.transport.handshake import Address, connect

logger = logging.getLogger(__name__)

# So often a generation connects anew: a connection that breaks again and again is none.
_TRIES = 3


class NodeMemory:
    """Connects to the server of this node. Thread-safe, except that one thread at a time writes snapshots.

    A connection that breaks is made anew, and everything is then as it was. Where that fails, every call raises
    StorageError, after at most forty seconds if the server is frozen, until the next generation is opened, which tries
    once more. Fenced: a newer generation has begun on this node.
    """

    def __init__(self, local_name: str, token: bytes) -> None:
        self._local_name = local_name
        self._token = token
        self._asking = threading.Lock()
        self._changed = threading.Condition()
        self._closed = False
        self._broken: str | None = None
        self._progress: dict[str, Any] = {}
        self._generation = self._committed = self._settled = -1
        self._maps: dict[int, mmap.mmap] = {}
        # What a new connection has to be told: the generation that is open, and the memory that is being written.
        self._opened: Message | None = None
        self._writing: int | None = None
        self._tries = 0
        try:
            with self._asking:
                self._link = self._connect()
        except OSError as error:
            raise StorageError(f"this node's memory of snapshots cannot be reached: {error}") from error

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
        self._opened, self._writing, self._tries = None, None, 0
        message = {
            "do": "open",
            "template": template_to_json(template),
            "targets": [*targets],
            "base": base,
            "stripe": [*stripe],
        }
        self._ask(message)
        self._opened = message

    def ready(self) -> bool:
        """May `segment` be called? Not while the last snapshot is not known to have settled."""
        return self._committed <= self._settled

    def segment(self) -> memoryview:
        """Writable memory for the next snapshot. What it held is invalid from now on; it is never the settled one.

        Raises IntegrityError unless `ready`: the last snapshot may be what a recovery needs.
        """
        number, nbytes = self._given(self._ask({"do": "begin"}))
        self._writing = number
        return memoryview(self._maps[number])[:nbytes]

    def commit(self, step: int, client: Mapping[str, Json] | None) -> None:
        """The segment holds step `step`. Returns at once; replication goes on without this process."""
        state = client_state(None if client is None else dict(client))
        self._ask({"do": "commit", "step": step, "client": state})
        self._committed, self._writing = step, None

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
        self._closed = True
        self._link.end("it was closed")
        self._gone("it was closed")
        self._link.join()
        self._maps.clear()

    def _ask(self, message: Message) -> Answer:
        with self._asking:
            writing, answer = self._writing, self._link.ask(message)
            if answer is None and self._reconnected():
                if writing != self._writing:
                    # The commit had been heard; what was lost is the answer.
                    return {}, None
                answer = self._link.ask(message)
            if answer is None:
                self._gone(self._link.broken or "")
                raise StorageError(f"this node's memory of snapshots is gone: {self._broken}")
            return checked(answer[0]), answer[1]

    def _lost(self, link: Link) -> None:
        """On the connection's own thread. Whoever asks something at this moment sees to it."""
        with self._asking:
            if link is self._link and not self._reconnected():
                self._gone(link.broken or "")
            link.release()

    def _connect(self) -> Link:
        return Link(connect(self._local_name, self._token), self._hear, self._lost)

    def _reconnected(self) -> bool:
        """Another connection, on which everything is as it was on the last one. For holders of `_asking`."""
        if self._closed or self._tries >= _TRIES:
            return False
        why, self._tries = self._link.broken, self._tries + 1
        try:
            self._link = self._connect()
            self._resume()
        except (OSError, ElasticError) as error:
            self._tries = _TRIES
            self._link.end("it was given up")
            self._gone(f"{why}, and it could not be connected anew: {error}")
            return False
        logger.warning("this node's memory of snapshots was connected anew: %s", why)
        with self._changed:
            self._broken = None
        return True

    def _resume(self) -> None:
        """Raises OSError or ElasticError where the server does not go on where it was."""
        if self._opened is None:
            return
        step = int(self._answer(self._opened)[0]["step"])
        if self._writing is not None and step > self._committed:
            self._writing = None
        elif self._writing is not None and self._given(self._answer({"do": "begin"}))[0] != self._writing:
            raise StorageError("the memory that was being written is not this worker's any more")

    def _answer(self, message: Message) -> Answer:
        answer = self._link.ask(message)
        if answer is None:
            raise ConnectionError(self._link.broken)
        return checked(answer[0]), answer[1]

    def _given(self, answer: Answer) -> tuple[int, int]:
        """Number and size of the memory for the next snapshot, which is mapped here from now on."""
        number, nbytes, fd = int(answer[0]["number"]), int(answer[0]["nbytes"]), answer[1]
        if fd is not None:
            try:
                # On a new connection it is given once more: it is the same memory, and a copy into it may be under way.
                if number not in self._maps:
                    self._maps[number] = map_segment(fd, nbytes)
            finally:
                os.close(fd)
        return number, nbytes

    def _hear(self, progress: Mapping[str, Any]) -> None:
        with self._changed:
            # What was on its way when a new generation was opened is not about that one.
            if progress["generation"] == self._generation:
                # On a new connection it is found out anew.
                complete = max(progress["complete_step"], self._progress.get("complete_step", -1))
                self._progress = {**progress, "complete_step": complete}
                self._changed.notify_all()

    def _gone(self, reason: str) -> None:
        with self._changed:
            self._broken = self._broken or f"this node's memory of snapshots cannot be reached: {reason}"
            self._changed.notify_all()
