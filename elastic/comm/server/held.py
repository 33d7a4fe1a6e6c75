"""One server's copy of a shard: what it is worth by the newest view, and what a generation that is over has left."""

from __future__ import annotations

import threading

from elastic.comm.server.requests import Answered, ReadFrozen, hash_of, listed
from elastic.comm.server.shard import Shard
from elastic.core.errors import Fenced
from elastic.core.server.continuing import HeldCopy
from elastic.core.server.global_batches import Batches
from elastic.core.server.placement import Copy, Servers
from elastic.transport.channel import Channel


class Held:
    """Everything but `link` is used under `changed`, by other methods than these."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.changed = threading.Condition()
        self.copy = Copy()
        self.servers: Servers | None = None
        self.shard: Shard | None = None
        self.loaded = ""
        # The state of the rules, where this is the shard that keeps them.
        self.batches: Batches | None = None
        # Of the ranks that have said so: how many steps' gradients all shards have.
        self.steps: dict[int, int] = {}
        # To the replica, once it is in step.
        self.link: Channel | None = None
        self.frozen = False
        # The generation before and what was held in it, until the next one has begun everywhere.
        self.before: tuple[int, Shard] | None = None

    def unlink(self) -> None:
        if self.link is not None:
            self.link.close()
            self.link = None

    def own(self) -> tuple[int, Shard] | None:
        """The epoch, and what is held in it, where that is in step."""
        if self.servers is None or self.shard is None or self.copy.epoch != self.servers.epoch:
            return None
        return self.servers.epoch, self.shard

    def freeze(self, generation: int) -> list[HeldCopy]:
        """See `Freeze`."""
        servers, link = self.servers, self.link
        if link is not None and servers is not None and servers.epoch < generation:
            link.shut()  # who waits for a replica that is lost need not wait for its limit
        with self.changed:
            self.frozen = self.frozen or (self.servers is not None and self.servers.epoch < generation)
            self.changed.notify_all()
            known = [own for own in (self.before, self.own()) if own is not None and own[0] < generation]
            return [_described(self.number, epoch, shard) for epoch, shard in known if shard.spec.keeps_last]

    def read_frozen(self, request: ReadFrozen) -> Answered:
        with self.changed:
            known = (self.before, self.own() if self.frozen else None)
            shard = next((own[1] for own in known if own is not None and own[0] == request.epoch), None)
            if shard is None:
                raise Fenced(f"shard {self.number} is not held here as generation {request.epoch} has left it")
            state = {name: tensor.clone() for name, tensor in shard.at(request.version, request.scales).items()}
            notes = [
                [step, rank, note]
                for step, own in sorted(shard.notes.items())
                for rank, note in sorted(own.items())
                if request.noted < step <= request.version
            ]
        return {"tensors": listed(state), "notes": notes, "xxh3": hash_of(state.values())}, tuple(state.values())


def _described(number: int, epoch: int, shard: Shard) -> HeldCopy:
    ranks, (first, last) = shard.spec.micros, shard.given
    closed = tuple(step for step, notes in shard.notes.items() if len(notes) == ranks)
    return HeldCopy(epoch, number, shard.spec.shards, ranks, first, last, closed, shard.squares())
