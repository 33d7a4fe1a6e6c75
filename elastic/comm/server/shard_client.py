"""Requests to whoever serves a shard now, and what the one who sees the whole run tells the servers."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import TypeVar

import torch

from elastic.comm.server.requests import (
    ANSWER_LIMIT_S,
    Install,
    Load,
    OfShard,
    Protect,
    ReadBatches,
    ReadView,
    Request,
    Tell,
    answer_from_json,
    listed,
    receive_tensors,
    send_tensors,
    to_json,
)
from elastic.comm.server.shard import Shard
from elastic.core.errors import CollectiveFailed, ElasticError, Fenced
from elastic.core.server.global_batches import Answer, Batches, Event, Members
from elastic.core.server.placement import View
from elastic.core.typed_json import decode
from elastic.transport.channel import Channel, Message, checked
from elastic.transport.handshake import Address, connect

# The shard that keeps the rules' state beside its numbers.
LEAD = 0
# Less than the limit for an answer.
WAIT_S = 5.0
_PAUSE_S = 0.05

_T = TypeVar("_T")
_Tensors = dict[str, torch.Tensor]


class ShardClient:
    """Of one worker, or of who announces views. A shard that moves is followed: a request that failed is made again,
    with the newest view that any server knows, for `limit_s` at most; then CollectiveFailed. `check` raises where
    nothing is to be tried again."""

    def __init__(
        self,
        addresses: Iterable[Address],
        token: bytes,
        *,
        limit_s: float = 60.0,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._check = check
        self._token = token
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._addresses = dict.fromkeys(addresses)  # of every server that it has ever heard of
        self._view: View | None = None
        # One connection per shard, so that requests to shards on one server do not wait for each other.
        self._channels: dict[int, tuple[Address, Channel]] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._closed = threading.Event()

    def view(self) -> View:
        """The newest view. Raises CollectiveFailed where no server knows one."""
        view = self._view or self._refreshed()
        if view is None:
            raise CollectiveFailed("no parameter server knows who serves which shard")
        return view

    def ask(
        self, shard: int, request: Callable[[int], OfShard], tensors: Sequence[torch.Tensor] = ()
    ) -> tuple[Message, _Tensors]:
        """The answer to `request(epoch)`, and the tensors that follow it."""
        until = time.monotonic() + self._limit_s
        while True:
            self._check()
            try:
                view = self.view()
                servers = view.shards[shard]
                return self._asked(shard, view.addresses[servers.primary], request(servers.epoch), tensors)
            except (OSError, CollectiveFailed, Fenced) as error:
                self._disconnect(shard)
                self._check()
                if time.monotonic() > until or self._closed.wait(_PAUSE_S):
                    why = f"shard {shard} could not be reached for {self._limit_s:g} s: {error}"
                    raise CollectiveFailed(why) from error
                self._refreshed()

    def each(self, ask: Callable[[int], _T]) -> list[_T]:
        """`ask(shard)` for all shards at once. Of what they raise the first comes out, whatever others wait for."""
        count = len(self.view().shards)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(count, thread_name_prefix="parameter shard")
        asked = [self._pool.submit(ask, shard) for shard in range(count)]
        for done in wait(asked, return_when=FIRST_EXCEPTION).done:
            done.result()
        return [each.result() for each in asked]

    def tell(self, event: Event, wait_s: float = 0.0) -> Answer:
        message, _ = self.ask(LEAD, lambda epoch: Tell(LEAD, epoch, "primary", event, wait_s))
        return answer_from_json(message)

    def batches(self) -> Batches:
        """The rules' state."""
        message, _ = self.ask(LEAD, lambda epoch: ReadBatches(LEAD, epoch))
        return decode(Batches, message["batches"])

    # For who sees the whole run.

    def announce(self, view: View) -> None:
        """Tell all servers of a view, and wait until every shard has both of its copies in step.

        Raises CollectiveFailed where one cannot be reached (another view must follow, without it), IntegrityError where
        both copies of a shard are lost.
        """
        for name, address in view.addresses.items():
            try:
                self._once(address, Install(view))
            except OSError as error:
                raise CollectiveFailed(f"parameter server {name} cannot be reached: {error}") from error
        self.heard(view)

    def protect(self) -> None:
        """Wait until every shard has both of its copies in step."""
        self.each(lambda shard: self.ask(shard, lambda epoch: Protect(shard, epoch)))

    def load(self, shards: Sequence[Shard], batches: Batches) -> None:
        """Begin a run: hand every shard its state. Its servers have heard of the first view.

        Raises UsageError where a shard has another run's state.
        """
        self.each(lambda shard: self.load_shard(shard, shards[shard], batches if shard == LEAD else None))

    def load_shard(self, number: int, shard: Shard, batches: Batches | None = None) -> None:
        """The same for one shard. Returns when both of its copies have the state."""
        name, (meta, tensors) = uuid.uuid4().hex, shard.everything()
        self.ask(
            number,
            lambda epoch: Load(number, epoch, "primary", name, shard.spec, meta, batches, listed(tensors)),
            tuple(tensors.values()),
        )
        self.ask(number, lambda epoch: Protect(number, epoch))

    def members(self, workers: Iterable[str]) -> None:
        """These workers live; all others are lost."""
        self.tell(Members(tuple(workers)))

    def close(self) -> None:
        self._closed.set()
        for _, channel in list(self._channels.values()):
            channel.shut()
        if self._pool is not None:
            # What waits in a channel has ended with it; a connection that is being made has its own limit.
            self._pool.shutdown(cancel_futures=True)
        for shard in list(self._channels):
            self._disconnect(shard)

    def _asked(
        self, shard: int, address: Address, request: OfShard, tensors: Sequence[torch.Tensor]
    ) -> tuple[Message, _Tensors]:
        channel = self._channel(shard, address)
        channel.send(to_json(request))
        send_tensors(channel, tensors)
        answer = checked(channel.receive()[0])
        return answer, receive_tensors(channel, tuple((name, numel) for name, numel in answer.get("tensors", ())))

    def _channel(self, shard: int, address: Address) -> Channel:
        known = self._channels.get(shard)
        if known is not None and known[0] == address:
            return known[1]
        self._disconnect(shard)
        channel = connect(address, self._token)
        channel.limit(ANSWER_LIMIT_S)
        self._channels[shard] = (address, channel)
        return channel

    def _disconnect(self, shard: int) -> None:
        known = self._channels.pop(shard, None)
        if known is not None:
            known[1].close()

    def _refreshed(self) -> View | None:
        """Asks every server; those that are lost or that were told nothing say nothing."""
        for address in list(self._addresses):
            with suppress(OSError, ElasticError):
                data = self._once(address, ReadView()).get("view")
                if data is not None:
                    self.heard(decode(View, data))
        return self._view

    def heard(self, view: View) -> None:
        """A view from elsewhere: all servers that this client knows may be gone by now. From any thread."""
        with self._lock:
            if self._view is None or view.number > self._view.number:
                self._view = view
            self._addresses.update(dict.fromkeys(view.addresses.values()))

    def _once(self, address: Address, request: Request) -> Mapping[str, object]:
        channel = connect(address, self._token)
        try:
            return channel.ask(to_json(request))
        finally:
            channel.close()
