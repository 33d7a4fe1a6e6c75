"""A node's shards: primaries, which order what is done and pass it on first, and replicas, which do the same.

An acknowledged request is on both copies. A primary that cannot reach its replica acknowledges nothing; who asks tries
again, with the newest view. After any break between the two the replica is sent the whole state.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import replace

import torch
from typing_extensions import assert_never

from elastic.comm.server.held import Held
from elastic.comm.server.requests import (
    ANSWER_LIMIT_S,
    Advance,
    Answered,
    Apply,
    Close,
    Freeze,
    Install,
    Load,
    OfShard,
    Protect,
    Pull,
    Push,
    ReadBatches,
    ReadCut,
    ReadFrozen,
    ReadState,
    ReadView,
    Request,
    Tell,
    answer_from_json,
    answer_to_json,
    from_json,
    listed,
    receive_tensors,
    send_tensors,
    to_json,
)
from elastic.comm.server.shard import Shard, from_everything
from elastic.core.errors import CollectiveFailed, ElasticError, Fenced, IntegrityError, UsageError
from elastic.core.server.continuing import HeldCopy
from elastic.core.server.global_batches import Answer, Batch, Unknown, Wait, rank_batch, step
from elastic.core.server.placement import Copy, Role, Servers, View, installed, refused
from elastic.core.typed_json import encode
from elastic.transport.channel import Channel, Message, checked, error_message
from elastic.transport.handshake import Address, connect
from elastic.transport.listener import Listener

logger = logging.getLogger(__name__)

_JOIN_LIMIT_S = 15.0
_IDLE_S = 30.0


class ShardServer:
    """Listens on (host, free port) and starts its threads. `name` is the server's in views; empty: `name_at` of where
    it listens."""

    def __init__(self, name: str, token: bytes, host: str) -> None:
        self._given = name
        self._token = token
        self._lock = threading.Lock()
        self._view: View | None = None
        self._held: dict[int, Held] = {}
        # The first optimizer of a process imports much of torch, which takes seconds: not within a request.
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)
        self._listener = Listener(token, host, self._serve, name="parameter")

    @property
    def address(self) -> Address:
        return self._listener.address

    @property
    def _name(self) -> str:
        return self._given or name_at(self.address)

    def close(self) -> None:
        """End all threads, within a limit."""
        self._listener.shut()
        for held in list(self._held.values()):
            if held.link is not None:
                held.link.shut()
        if not self._listener.close(_JOIN_LIMIT_S):
            logger.warning("a thread of the parameter server has not ended within %s s", _JOIN_LIMIT_S)
        for held in self._held.values():
            held.unlink()

    def _serve(self, channel: Channel, local: bool) -> None:
        while True:
            while channel.idle(_IDLE_S):
                pass
            request = from_json(channel.receive()[0])
            tensors = receive_tensors(channel, request.tensors) if isinstance(request, Load | Push) else {}
            try:
                answer, following = self._handle(request, tensors)
            except ElasticError as error:
                channel.send(error_message(error))
            else:
                channel.send(answer)
                send_tensors(channel, following)

    def _handle(self, request: Request, tensors: Mapping[str, torch.Tensor]) -> Answered:
        match request:
            case Install():
                self._install(request.view)
                return {}, ()
            case Freeze():
                return {"held": [encode(copy) for copy in self._freeze(request.generation)]}, ()
            case ReadFrozen():
                return self._known(request.shard).read_frozen(request)
            case ReadView():
                with self._lock:
                    return {"view": None if self._view is None else encode(self._view)}, ()
            case _:
                held = self._known(request.shard)
                with held.changed:
                    return self._of_shard(held, request, tensors)

    def _known(self, shard: int) -> Held:
        with self._lock:
            held = self._held.get(shard)
        if held is None:
            raise Fenced(f"server {self._name} has not heard of shard {shard}")
        return held

    def _install(self, view: View) -> None:
        with self._lock:
            if self._view is not None and view.number <= self._view.number:
                return
            self._view = view
            for number in range(len(view.shards)):
                self._held.setdefault(number, Held(number))
        for number, servers in enumerate(view.shards):
            held = self._held[number]
            link = held.link
            if link is not None and servers != held.servers:
                link.shut()  # who waits for a replica that is lost need not wait for its limit
            with held.changed:
                self._install_shard(held, servers)

    def _install_shard(self, held: Held, servers: Servers) -> None:
        if held.servers is not None and held.servers.epoch >= servers.epoch:
            return
        own = held.own()
        if own is not None and own[1].spec.keeps_last:
            held.before = own
        held.servers, held.frozen = servers, False
        held.copy = installed(held.copy, self._name, servers)
        if held.copy.epoch is None:
            held.shard = held.batches = None
        held.unlink()
        held.changed.notify_all()

    def _freeze(self, generation: int) -> list[HeldCopy]:
        with self._lock:
            known = list(self._held.values())
        return [copy for held in known for copy in held.freeze(generation)]

    def _begun(self, epoch: int) -> None:
        """All shards have their state in this generation: what is left of the one before is not needed any more."""
        with self._lock:
            view = self._view
            if view is None or view.number != epoch:
                return
            for number in [number for number in self._held if number >= len(view.shards)]:
                self._held.pop(number).unlink()
            for held in self._held.values():
                held.before = None

    def _of_shard(self, held: Held, request: OfShard, tensors: Mapping[str, torch.Tensor]) -> Answered:
        match request:
            case Load():
                return self._load(held, request, tensors)
            case Protect():
                self._own(held, request.epoch)
                self._linked(held)
                return {}, ()
            case Push():
                shard = self._own(held, request.epoch, request.role)
                gradient = tensors["gradient"]
                if held.before is not None:
                    self._begun(request.epoch)
                if request.role == "primary":
                    self._forward(held, replace(request, role="replica"), gradient)
                shard.push(request.part, gradient, request.options)
                return {}, ()
            case Apply():
                shard = self._own(held, request.epoch, "replica")
                shard.apply(request.version, request.batch, request.scale)
                return {"digest": shard.digest()}, ()
            case Pull():
                return _parameters(self._advanced(held, request.epoch, request.version, request.batches), request.have)
            case Advance():
                return self._steps_done(held, request)
            case Close():
                shard = self._own(held, request.epoch, request.role)
                if request.role == "primary":
                    self._forward(held, replace(request, role="replica"))
                shard.close(request.step, request.rank, request.note, request.forget)
                return {}, ()
            case ReadState():
                shard = self._own(held, request.epoch)
                state = {name: tensor.clone() for name, tensor in shard.state().items()}
                return {"version": shard.version, "tensors": listed(state)}, tuple(state.values())
            case Tell():
                return answer_to_json(self._told(held, request)), ()
            case ReadBatches():
                self._own(held, request.epoch)
                return {"batches": None if held.batches is None else encode(held.batches)}, ()
            case ReadCut():
                shard = self._advanced(held, request.epoch, request.version, request.batches)
                cut = shard.cut(request.version)
                if cut is None:
                    raise Fenced(f"shard {held.number} no longer keeps its state after update {request.version}")
                return {"tensors": listed(cut)}, tuple(cut.values())
            case _:
                assert_never(request)

    def _own(self, held: Held, epoch: int, role: Role = "primary") -> Shard:
        assert held.servers is not None
        if held.frozen:
            raise Fenced(f"shard {held.number}: generation {epoch} is over")
        why = refused(held.copy, self._name, held.servers, epoch, role)
        if why is not None:
            # Nothing will bring it back: who asks need not ask again.
            gone = epoch == held.servers.epoch and held.copy.epoch is None and self._name == held.servers.primary
            raise (IntegrityError if gone else Fenced)(f"shard {held.number}: {why}")
        if held.shard is None:
            raise IntegrityError(f"shard {held.number} has no state")
        return held.shard

    def _load(self, held: Held, request: Load, tensors: Mapping[str, torch.Tensor]) -> Answered:
        servers = held.servers
        assert servers is not None
        mine = servers.primary if request.role == "primary" else servers.replica
        if request.epoch != servers.epoch or mine != self._name:
            raise Fenced(f"shard {held.number} is not to be loaded by {self._name} in epoch {request.epoch}")
        if request.role == "primary" and held.copy.epoch is not None:
            if held.loaded == request.name:
                return {}, ()
            raise UsageError(f"shard {held.number} has a state already, which loading another would lose")
        held.shard = from_everything(request.spec, request.meta, tensors)
        held.batches, held.copy, held.loaded = request.batches, Copy(servers.epoch), request.name
        held.steps = {}
        return {}, ()

    def _linked(self, held: Held) -> Channel | None:
        """The connection to the replica, which is in step then; None where there is none by the view."""
        assert held.servers is not None
        assert held.shard is not None
        assert self._view is not None
        replica, view = held.servers.replica, self._view
        if replica is None or held.link is not None:
            return held.link
        meta, tensors = held.shard.everything()
        epoch, spec = held.servers.epoch, held.shard.spec
        request = Load(held.number, epoch, "replica", held.loaded, spec, meta, held.batches, listed(tensors))
        try:
            link = connect(view.addresses[replica], self._token)
            try:
                link.limit(ANSWER_LIMIT_S)
                link.send(to_json(request))
                send_tensors(link, tuple(tensors.values()))
                checked(link.receive()[0])
            except BaseException:
                link.close()
                raise
        except (OSError, KeyError) as error:
            raise CollectiveFailed(
                f"the replica of shard {held.number} on {replica} does not answer: {error}"
            ) from error
        held.link = link
        return link

    def _forward(
        self, held: Held, request: Push | Apply | Tell | Close, gradient: torch.Tensor | None = None
    ) -> Message:
        link = self._linked(held)
        if link is None:
            return {}
        try:
            link.send(to_json(request))
            if gradient is not None:
                send_tensors(link, (gradient,))
            return checked(link.receive()[0])
        except (OSError, ElasticError) as error:
            # It may have done it or not: the next request begins with the whole state.
            held.unlink()
            if isinstance(error, ElasticError):
                raise
            raise CollectiveFailed(f"the replica of shard {held.number} is lost: {error}") from error

    def _advanced(
        self,
        held: Held,
        epoch: int,
        version: int,
        batches: Mapping[int, Batch],
        scales: Mapping[int, float] | None = None,
    ) -> Shard:
        """The shard after at least `version` updates, on both copies."""
        shard = self._own(held, epoch)
        # Also where no update is lacking: its answer is a promise for both copies.
        self._linked(held)
        for at in range(shard.version, version):
            lost = shard.missing(batches[at]) if at in batches else [f"the batch of update {at}"]
            if lost:
                raise IntegrityError(f"shard {held.number} does not have {lost}, which was acknowledged")
            scale = (scales or {}).get(at)
            answer = self._forward(held, Apply(held.number, epoch, at, batches[at], scale))
            shard.apply(at, batches[at], scale)
            if answer and answer["digest"] != shard.digest():
                held.unlink()
                raise IntegrityError(f"the copies of shard {held.number} differ after update {at}")
        return shard

    def _steps_done(self, held: Held, request: Advance) -> Answered:
        until = time.monotonic() + request.wait_s
        self._own(held, request.epoch)
        held.steps[request.rank] = max(request.steps, held.steps.get(request.rank, 0))
        held.changed.notify_all()
        while True:
            # Also after a wait, in which a newer view may have come.
            shard = self._own(held, request.epoch)
            ranks = shard.spec.micros
            done = min(held.steps.values()) if len(held.steps) == ranks else shard.version
            if done >= request.version:
                break
            left_s = until - time.monotonic()
            if left_s <= 0 or not held.changed.wait(left_s):
                return {"waits": True}, ()
        if request.measures:
            return {"done": done, "version": shard.version, "squares": [*shard.squares().items()]}, ()
        done = done if request.until is None else min(done, request.until)
        batches = {at: rank_batch(at, ranks) for at in range(shard.version, done)}
        return _parameters(self._advanced(held, request.epoch, done, batches, request.scales), request.have)

    def _told(self, held: Held, request: Tell) -> Answer:
        until = time.monotonic() + request.wait_s
        while True:
            self._own(held, request.epoch, request.role)
            if held.batches is None:
                raise Fenced(f"shard {held.number} does not keep the rules' state")
            batches, answer = step(held.batches, request.event)
            if not isinstance(answer, Wait):
                break
            left_s = until - time.monotonic()
            if left_s <= 0 or not held.changed.wait(left_s):
                return answer
        if isinstance(answer, Unknown):
            return answer
        if request.role == "primary":
            passed = self._forward(held, Tell(held.number, request.epoch, "replica", request.event))
            if passed and answer_from_json(passed) != answer:
                held.unlink()
                raise IntegrityError(f"the copies of shard {held.number} answer unlike")
        held.batches = batches
        held.changed.notify_all()
        return answer


def name_at(address: Address) -> str:
    return f"{address[0]}:{address[1]}"


def _parameters(shard: Shard, have: int) -> Answered:
    following = (shard.flat.clone(),) if shard.version > have else ()
    return {"version": shard.version, "tensors": [["parameters", each.numel()] for each in following]}, following
