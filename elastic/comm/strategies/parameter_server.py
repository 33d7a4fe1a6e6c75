"""Gradients go to a parameter server on the run's nodes, which makes the updates: bounded staleness, freshest first.

In step t a rank sends its gradient to all shards, and takes the newest parameters that there are, of at least update
t - staleness: it waits for the slowest rank only where that is further behind (SSP, Ho et al., NIPS 2013). An update is
made when the gradients of all ranks of its step are there (GBA, Su et al., arXiv 2205.11048), so that batch and
learning rate keep their meaning. At the end of a *round* (`core.checkpoint.rounds`) every rank has the parameters and
the optimizer's state after the same update, which it takes from the servers: there the run may be saved, or stop.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from elastic.checkpoint.shares import Live, Newer, Shares, StepPart, Told
from elastic.comm.collective_ledger import CollectiveLedger
from elastic.comm.server.frozen import freeze, notes_of, read_shard
from elastic.comm.server.requests import Advance, Close, Push, ReadState
from elastic.comm.server.shard import fresh, joined, part_of
from elastic.comm.server.shard_client import LEAD, WAIT_S, ShardClient
from elastic.comm.server.shard_server import name_at
from elastic.comm.server.worker import FlatModel
from elastic.core.checkpoint.manifest import Json
from elastic.core.checkpoint.rounds import PARAMETER_SERVER, Rounds
from elastic.core.data.steps import StepReport
from elastic.core.errors import CollectiveFailed, Fenced, IntegrityError, StorageError
from elastic.core.server.continuing import Saved, Whole, goes_on_from, scales_of, wholes
from elastic.core.server.global_batches import rank_part
from elastic.core.server.placement import generation_view
from elastic.core.settings import CommunicationSettings
from elastic.core.typed_json import decode, encode
from elastic.transport.channel import Message
from elastic.transport.handshake import Address

# A server that does not answer is on a node that is lost: the generation ends, and the run goes on without it.
_LIMIT_S = 10.0
_AXIS = "servers"


@dataclass(frozen=True)
class Access:
    """What a rank needs to take part: the server of its node and the run's token. `check` raises when the generation is
    over; connections to `addresses` end with it."""

    address: Address
    token: bytes
    check: Callable[[], None]
    connects_to: Callable[[Sequence[Address]], None]


class ServedUpdates(Shares):
    """Of one rank in one generation, on the training thread: `update` takes the place of the optimizer's own."""

    def __init__(
        self,
        settings: CommunicationSettings,
        generation: int,
        nodes: Sequence[int],
        group: dist.ProcessGroup,
        ledger: CollectiveLedger,
        watched: bool,
        model: FlatModel,
        access: Access,
        clip: float,
    ) -> None:
        """`nodes[rank]`: the rank's node. `watched`: a gradient that is not finite is not sent; the engine's step is
        judged by it. `clip`: the norm to which gradients are clipped; 0.0: to none."""
        self._settings, self._generation, self._nodes, self._watched = settings, generation, nodes, watched
        self._group, self._clip = group, clip
        self._rounds, self._model, self._access = Rounds.of(settings), model, access
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._client: ShardClient | None = None
        self._part: Callable[[], StepPart] | None = None
        # Finished steps, the updates in each shard's part of `_flat`, and that part.
        self._steps, self._versions, self._ranges = 0, list[int](), list[tuple[int, int]]()
        self._flat = torch.empty(0)
        self._whole = True
        # What the generation was restored from, and the last two ends of rounds: also the older one may be where the
        # run goes back to.
        self._origin, self._ends = Saved(), (0, 0)
        self._early: list[tuple[int, str]] = []
        self._told: Told | None = None
        self._ledger = ledger
        self._send = ledger.timed("push", self._pushed, axis=_AXIS)
        self._take = ledger.timed("pull", self._pulled, axis=_AXIS)
        self._take_state = ledger.timed("pull", self._state_after, axis=_AXIS)
        ledger.remark = (
            f"{PARAMETER_SERVER}: at most {settings.staleness} updates are missing, and none after every "
            f"{self._rounds.every} steps"
        )

    def begin(self, live: Callable[[], Live], part: Callable[[], StepPart], told: Told) -> None:
        self._part, self._told = part, told

    def newer(self, saved: Saved) -> Newer | None:
        """What the servers hold of the generation that was lost. They take no more of it."""
        self._origin, step = saved, saved.step
        with _translated():
            addresses, _ = self._servers()
            self._access.connects_to(list(addresses.values()))
            chosen = [self._left(addresses, saved) if self._rank == 0 else None]
            dist.broadcast_object_list(chosen, src=dist.get_global_rank(self._group, 0), group=self._group)
            whole, token = chosen[0], self._access.token
            if whole is None:
                return None
            scales = scales_of(whole.squares, self._clip)
            parts = [
                read_shard(addresses[at], token, whole, shard, step, scales) for shard, at in enumerate(whole.holders)
            ]
        state = joined(item for _, tensors in parts for item in tensors.items())
        notes = {at: [json.loads(own[rank]) for rank in sorted(own)] for at, own in notes_of(parts[LEAD][0]).items()}
        reports = {at: [note["report"] for note in own] for at, own in notes.items()}
        self._ledger.remark += f"; updates {step + 1} to {whole.version} are taken over from its servers"
        return Newer(whole.version, notes[whole.version][0]["told"], reports, lambda: self._model.install_state(state))

    def closed(self, report: StepReport) -> None:
        """Its gradient may be in an update that outlives this rank: others must be able to report the step then."""
        note: dict[str, Json] = {"report": report.to_json(), "origin": encode(self._origin)}
        if self._rank == 0:
            note["told"] = None if self._told is None else self._told()
        if self._client is None:
            # Taken over from the generation before: the servers get it with the state that it belongs to.
            self._early.append((report.step, json.dumps(note)))
            return
        if self._whole:
            self._ends = (self._ends[1], report.step)
        with _translated():
            self._note(self._client, report.step, json.dumps(note))

    @property
    def whole(self) -> bool:
        return self._whole

    def update(self, own: Callable[[], object]) -> None:
        """In the engine's step, with the rank's own gradient. `own`, the optimizer's, is not called. Collective in the
        generation's first step."""
        assert self._part is not None
        part = self._part()
        with _translated():
            if self._client is None:
                self._client = self._opened(part.step)
            gradient = self._model.gradient()
            if self._watched and not bool(gradient.isfinite().all()):
                return
            self._send(gradient)
            self._steps += 1
            self._whole = part.last or self._rounds.begins(self._steps) is not None
            if self._whole:
                self._settle()
            else:
                self._take(self._steps - self._settings.staleness)
                self._model.install(self._flat)

    def settle(self) -> None:
        """The script ends within a round."""
        with _translated():
            self._settle()
        self._whole = True

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _opened(self, step: int) -> ShardClient:
        """The state after `step` steps goes to the servers. Every rank has all of it: the first one of each node hands
        out one shard."""
        addresses, first = self._servers()
        access, view = self._access, generation_view(self._generation, addresses)
        access.connects_to(list(addresses.values()))
        client = ShardClient(addresses.values(), access.token, limit_s=_LIMIT_S, check=access.check)
        client.heard(view)
        if self._rank == 0:
            client.announce(view)
        dist.barrier(group=self._group)
        specs = self._model.specs(len(first), self._ranks, keeps_last=True, clips=self._clip > 0.0)
        if self._rank in first:
            shard, state = first.index(self._rank), self._model.state()
            spec = specs[shard]
            client.load_shard(shard, fresh(spec, step, step * self._ranks, (), part_of(spec, state)))
        dist.barrier(group=self._group)
        self._ends = (self._origin.step, self._origin.step)
        for at, note in self._early:
            self._note(client, at, note)
        self._ranges = [(spec.begin, spec.end) for spec in specs]
        self._steps, self._versions, self._flat = step, [step] * len(specs), self._model.parameters()
        return client

    def _note(self, client: ShardClient, step: int, note: str) -> None:
        forget = self._ends[0] + 1
        client.ask(LEAD, lambda epoch: Close(LEAD, epoch, "primary", self._rank, step, note, forget))

    def _left(self, addresses: Mapping[str, Address], saved: Saved) -> Whole | None:
        """The newest state of which all shards are there and that has followed the one that was restored."""
        held = freeze(addresses, self._access.token, self._generation)
        return next((whole for whole in wholes(held) if self._follows(whole, addresses, saved)), None)

    def _follows(self, whole: Whole, addresses: Mapping[str, Address], saved: Saved) -> bool:
        """Also: can all steps since then be reported, and is all that belongs to the state known?"""
        if whole.version <= saved.step:
            return False
        scales, lead = scales_of(whole.squares, self._clip), addresses[whole.holders[LEAD]]
        notes = notes_of(read_shard(lead, self._access.token, whole, LEAD, saved.step, scales)[0])
        steps = [step for step, own in notes.items() if len(own) == whole.ranks]
        if steps != [*range(saved.step + 1, whole.version + 1)]:
            return False
        last = json.loads(notes[whole.version][0])
        return last["told"] is not None and goes_on_from(whole, decode(Saved, last["origin"]), saved)

    def _servers(self) -> tuple[dict[str, Address], list[int]]:
        """The servers of all nodes, by their names in views, and the first rank of each node. Collective."""
        told: list[Address] = [("", 0)] * self._ranks
        dist.all_gather_object(told, self._access.address, group=self._group)
        first = [rank for rank, node in enumerate(self._nodes) if node not in self._nodes[:rank]]
        return {name_at(told[rank]): told[rank] for rank in first}, first

    def _pushed(self, gradient: torch.Tensor) -> None:
        client, part = self._connected(), rank_part(self._steps, self._rank, self._ranks)
        options = tuple(group.options for group in self._model.groups())

        def push(shard: int) -> None:
            begin, end = self._ranges[shard]
            listed = (("gradient", end - begin),)
            client.ask(
                shard,
                lambda epoch: Push(shard, epoch, "primary", part, listed, options),
                (gradient[begin:end],),
            )

        client.each(push)

    def _pulled(self, version: int) -> list[torch.Tensor]:
        """Into `_flat` the newest parameters, of at least `version` updates. Returns what came of each shard."""
        measured, flat = self._measured(version), self._flat

        def pull(shard: int) -> torch.Tensor:
            begin, end = self._ranges[shard]
            message, tensors = self._advanced(shard, version, self._versions[shard], *measured)
            self._versions[shard] = message["version"]
            if not tensors:
                return flat[:0]
            flat[begin:end] = tensors["parameters"]
            return tensors["parameters"]

        return self._connected().each(pull)

    def _measured(self, version: int) -> tuple[int | None, dict[int, float]]:
        """Where gradients are clipped: how many updates all shards can make, and the part of each gradient."""
        if self._clip <= 0.0:
            return None, {}
        told = self._connected().each(lambda shard: self._advanced(shard, version, self._steps, measures=True)[0])
        squares = [{int(at): float(square) for at, square in message["squares"]} for message in told]
        return min(message["done"] for message in told), scales_of(squares, self._clip)

    def _advanced(
        self,
        shard: int,
        version: int,
        have: int,
        until: int | None = None,
        scales: Mapping[int, float] | None = None,
        measures: bool = False,
    ) -> tuple[Message, dict[str, torch.Tensor]]:
        client, rank, steps, parts = self._connected(), self._rank, self._steps, scales or {}
        while True:
            message, tensors = client.ask(
                shard, lambda epoch: Advance(shard, epoch, rank, steps, version, have, WAIT_S, measures, until, parts)
            )
            if not message.get("waits"):
                return message, tensors

    def _settle(self) -> None:
        """Take the state after exactly the steps that this rank has made: no rank makes another one before that. Waits
        for the slowest."""
        names, steps = list[str](), self._steps
        tensors = self._take_state(steps, names)
        self._model.install_state(joined(zip(names, tensors, strict=True)))
        self._versions, self._flat = [steps] * len(self._versions), self._model.parameters()

    def _state_after(self, steps: int, names: list[str]) -> list[torch.Tensor]:
        """Of all shards, and to `names` what they are."""
        client, measured = self._connected(), self._measured(steps)

        def read(shard: int) -> dict[str, torch.Tensor]:
            self._advanced(shard, steps, steps, *measured)
            message, tensors = client.ask(shard, lambda epoch: ReadState(shard, epoch))
            if message["version"] != steps:
                raise IntegrityError(f"shard {shard} has made {message['version']} updates, not {steps}")
            return tensors

        parts = client.each(read)
        names += (name for part in parts for name in part)
        return [tensor for part in parts for tensor in part.values()]

    def _connected(self) -> ShardClient:
        if self._client is None:
            raise CollectiveFailed("the parameter server was not opened")
        return self._client


@contextmanager
def _translated() -> Iterator[None]:
    """What a server refuses is as the loss of a peer: the run goes back to what was saved."""
    try:
        yield
    except (IntegrityError, StorageError, Fenced, OSError) as error:
        raise CollectiveFailed(f"the parameter server: {error}") from error
