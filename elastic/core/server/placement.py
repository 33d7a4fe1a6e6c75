"""Which server holds which part of a model, twice, and what follows when servers are lost: pure.

The parameters are one flat vector, cut into as many ranges as there are shards. Each shard has a *primary*, which
orders what is done to it, and a *replica* on the next server, which does the same in the same order. The controller
of a run makes *views*: a server that is lost appears in no later one. A shard's *epoch* grows
when its servers change; messages carry it, so that a primary that was replaced while it was cut off gets nothing
acknowledged (primary-backup with an external view, as in Vertical Paxos, Lamport, Malkhi and Zhou 2009).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from elastic.core.errors import IntegrityError, UsageError


@dataclass(frozen=True)
class Servers:
    """The servers of one shard in an epoch. The primary may continue from a copy that was in step in epoch `before` or
    later: that before it became primary."""

    epoch: int
    before: int
    primary: str
    replica: str | None


@dataclass(frozen=True)
class View:
    """The servers of all shards. `addresses` are (host, port) of each server in it."""

    number: int
    addresses: dict[str, tuple[str, int]]
    shards: tuple[Servers, ...]


@dataclass(frozen=True)
class Copy:
    """What a server knows of its copy of a shard: the epoch in which it was last in step; None: it holds nothing."""

    epoch: int | None = None


Role = Literal["primary", "replica"]


def flat_ranges(numbers: int, shards: int) -> tuple[tuple[int, int], ...]:
    """[begin, end) of each shard of a vector, which differ by one in size at most."""
    if not 1 <= shards <= numbers:
        raise UsageError(f"{numbers} parameters cannot be cut into {shards} shards")
    return tuple((shard * numbers // shards, (shard + 1) * numbers // shards) for shard in range(shards))


def first_view(addresses: dict[str, tuple[str, int]]) -> View:
    """One shard per server; the replica is on the next one."""
    names = list(addresses)
    if len(names) < 2:
        raise UsageError(f"a parameter server needs two nodes, one for each copy of a shard, but has {len(names)}")
    shards = (Servers(1, 0, name, names[(at + 1) % len(names)]) for at, name in enumerate(names))
    return View(1, dict(addresses), tuple(shards))


def generation_view(generation: int, addresses: dict[str, tuple[str, int]]) -> View:
    """That of a generation of a run, whose members are fixed: what servers hold of an older one is not its state. A
    single server's shard has no second copy."""
    names = list(addresses)
    shards = (
        Servers(generation, generation, name, names[(at + 1) % len(names)] if len(names) > 1 else None)
        for at, name in enumerate(names)
    )
    return View(generation, dict(addresses), tuple(shards))


def next_view(view: View, lost: Collection[str], joined: dict[str, tuple[str, int]] | None = None) -> View:
    """The view after these servers were lost and others have joined: where a primary is lost its replica takes over,
    and every shard gets a replica on the server that has the fewest copies. One that is left alone has none.

    Raises IntegrityError where both copies of a shard are gone.
    """
    addresses = {name: at for name, at in {**view.addresses, **(joined or {})}.items() if name not in lost}
    shards: list[Servers] = []
    for number, servers in enumerate(view.shards):
        shards.append(_survived(number, servers, addresses))
    for number, servers in enumerate(shards):
        if servers.replica is None:
            shards[number] = _with_replica(servers, shards, list(addresses))
    changed = (_numbered(new, old) for new, old in zip(shards, view.shards, strict=True))
    return View(view.number + 1, addresses, tuple(changed))


def _numbered(new: Servers, old: Servers) -> Servers:
    if (new.primary, new.replica) == (old.primary, old.replica):
        return old
    return replace(new, epoch=old.epoch + 1, before=old.before if new.primary == old.primary else old.epoch)


def _survived(number: int, servers: Servers, addresses: Collection[str]) -> Servers:
    left = [name for name in (servers.primary, servers.replica) if name is not None and name in addresses]
    if not left:
        raise IntegrityError(f"both copies of shard {number}, on {servers.primary} and {servers.replica}, are lost")
    return replace(servers, primary=left[0], replica=left[1] if len(left) == 2 else None)


def _with_replica(servers: Servers, shards: Sequence[Servers], names: Sequence[str]) -> Servers:
    copies = [name for other in shards for name in (other.primary, other.replica)]
    others = [name for name in names if name != servers.primary]
    return replace(servers, replica=min(others, key=copies.count, default=None))


def installed(copy: Copy, name: str, servers: Servers) -> Copy:
    """What a server's copy is worth in an epoch. What is worth nothing must be forgotten: it is not the run's state."""
    if name == servers.primary:
        return Copy(servers.epoch) if copy.epoch is not None and copy.epoch >= servers.before else Copy()
    if name != servers.replica:
        return Copy()
    # A replica is in step when the primary of this epoch has sent it the state.
    return copy if copy.epoch == servers.epoch else Copy()


def refused(copy: Copy, name: str, servers: Servers, epoch: int, role: Role) -> str | None:
    """Why a request of that epoch to this role cannot be carried out here, as a sentence; None where it can."""
    if epoch != servers.epoch:
        return f"the request is of epoch {epoch}, and this shard's is {servers.epoch}"
    if name != (servers.primary if role == "primary" else servers.replica):
        return f"server {name} is not the {role} of this shard"
    if copy.epoch != epoch:
        return "the state of this shard is not here: both copies were lost, or it was never loaded"
    return None
