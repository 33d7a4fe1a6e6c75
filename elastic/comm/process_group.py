"""The process groups of one generation: joined through their own store, aborted from any thread, closed completely.

gloo on the CPU, NCCL on CUDA. Everything that touches private parts of torch.distributed is in this module, `sockets`,
`nccl` and `held_waits`. What an engine does around its groups comes in as `GroupHooks`.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from elastic.comm import nccl, sockets
from elastic.comm.allocator import let_segments_grow
from elastic.comm.held_waits import HeldWaits
from elastic.comm.hooks import GroupHooks
from elastic.comm.peer_addresses import exchange
from elastic.comm.rendezvous import await_all, connect, release_store
from elastic.comm.sockets import Address, TcpSocket
from elastic.core.generation_spec import GenerationSpec, Rendezvous

logger = logging.getLogger(__name__)

# An abort takes about a second. One that waits for a communicator under construction ends when the sockets are shut
# down; one that hangs all the same must not block its caller.
_ABORT_S = 1.5
_ABORT_LIMIT_S = 10.0
# In an abort a socket is shut down for reading; one that is still there after this, in both directions.
_READING_FIRST_S = 0.04
# What is not closed by then costs nobody anything but descriptors.
_DROPPED_S = 1.0

# The threads that drop groups: see `drop_later`.
_closing: list[threading.Thread] = []


class ProcessGroup:
    """Call order, on the training thread: 1. `join` 2. `before_engine` and `seal` before and after the engine
    makes its groups 3. `close`.
    `abort` may be called by any thread at any time and any number of times.
    """

    def __init__(self, spec: GenerationSpec, rendezvous: Rendezvous, hooks: GroupHooks, local_rank: int = 0) -> None:
        self.spec = spec
        self.rendezvous = rendezvous
        self.local_rank = local_rank
        self._hooks = hooks
        self._store: Store | None = None
        self._communicators: nccl.Communicators | None = None
        self._along: dict[str, dist.ProcessGroup] = {}
        # Before torch had put its own in its place, and torch's.
        self._excepthooks = sys.excepthook, sys.excepthook
        self._backend = ""
        self._aborting: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
        # Groups that are the platform's or the engine's; every other one is the script's.
        self._known: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
        self._of_script = False
        # Is an engine being built, or has that failed?
        self._builds = False
        self._foreign: frozenset[str] = frozenset()
        self._listening: frozenset[Address] = frozenset()
        self._peers_listening: frozenset[Address] = frozenset()
        self._rank_at: Mapping[Address, int] = {}
        # Until addresses are exchanged, every socket that was opened since `join` counts as one of the groups'.
        self._building = False
        self._joined = False
        # On the CPU; and when each socket was first shut down.
        self._waits: HeldWaits | None = None
        self._cut_at: dict[str, float] = {}
        # An abort that began in this generation must not see the sockets of the next one.
        self._abort_lock = threading.Lock()

    def join(self, check: Callable[[], None]) -> torch.device:
        """Connect to the store and form the world group; returns the device of this rank.

        `check` raises when the generation was ended meanwhile. Raises torch's DistError, or a RuntimeError of gloo.
        """
        backend, device = self._hooks.device(self.local_rank)
        self._backend = backend
        self._hooks.before_join()
        self._set_environment()
        if device.type == "cuda":
            # Without Ray: whoever has allocated on the device before has torch's own settings.
            let_segments_grow()
            torch.cuda.set_device(device)
        self._foreign = frozenset(found.inode for found in sockets.tcp_sockets())
        self._building = True
        self._joined = True
        if backend == "gloo":
            self._waits = HeldWaits(self.spec.generation, self.spec.collective_timeout_s, _groups)
            self._waits.install()
        check()
        self._store = connect(self.rendezvous, self.spec.collective_timeout_s, check)
        # An abort before this line found no socket to shut down; one after it finds the store's.
        check()
        # Groups are named by this counter and meet under their names. An attempt that was aborted half-way has moved it
        # on in this process alone.
        dist.distributed_c10d._world.group_count = 0
        before = sys.excepthook
        dist.init_process_group(
            backend,
            store=PrefixStore(f"generation{self.spec.generation}", self._store),
            rank=self.spec.rank,
            world_size=self.spec.world_size,
            timeout=self._timeout(),
        )
        self._excepthooks = before, sys.excepthook
        for axis in ("sp", "tp"):
            ranks = list(self.spec.mesh.along(axis, self.spec.rank))
            if len(ranks) > 1:
                # Known to its members alone: thousands of cells are not made on every rank.
                self._along[axis] = dist.new_group(ranks, timeout=self._timeout(), use_local_synchronization=True)
        if self.fails_silently:
            self._communicators = nccl.Communicators(device)
            self._connect("world")
        self._hooks.after_join(backend)
        self._known.update(_groups())
        return device

    def along(self, axis: str) -> dist.ProcessGroup | None:
        """The ranks that share sequences ("sp") or each layer ("tp") with this one; None where no other does, and after
        `close`."""
        return self._along.get(axis)

    def hand_out(self, axis: str) -> dist.ProcessGroup | None:
        """The same, for the user's code to hold: as with groups that it makes itself, it ends with the generation."""
        self._of_script = self._of_script or axis in self._along
        return self.along(axis)

    def know(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """These are made anew in each generation, and are not the script's to lose."""
        self._known.update(groups)

    @contextmanager
    def knowing(self) -> Iterator[None]:
        """What groups are made within it, these are."""
        before = list(_groups())
        yield
        self.know(group for group in _groups() if group not in before)

    def taken(self) -> None:
        """The script keeps what ends with the generation."""
        self._of_script = True

    def before_engine(self) -> None:
        """The engine is about to make its groups: those that appeared since `join` are the script's, and those that
        appear until `seal` are not, also where it never comes to that."""
        self._of_script, self._builds = self.has_groups_of_script, True

    @property
    def has_groups_of_script(self) -> bool:
        """Has the user's code made groups (torch.distributed.new_group)? They end with the generation."""
        return self._of_script or (not self._builds and any(group not in self._known for group in _groups()))

    @property
    def store(self) -> Store:
        """Of this generation, between `join` and `close`."""
        assert self._store is not None
        return self._store

    def collectives(self) -> int:
        """How many collectives this rank has begun in all groups together."""
        return sum(_begun(group) for group in _groups())

    def seal(self) -> None:
        """After the engine made its groups: set their timeouts and exchange socket addresses. Collective."""
        for group in list(_groups()):
            # A group that an engine clones (DeepSpeed's of the world group) has torch's default timeout.
            dist.distributed_c10d._set_pg_timeout(self._timeout(), group)
        if self.fails_silently:
            self._connect("engine")
        self._known.update(_groups())
        self._builds = False
        self._exchange_addresses()
        self._building = False

    def identify(self, peer: str | None) -> tuple[str | None, int | None]:
        """The peer "host:port" of gloo's message and its rank, where known."""
        if peer is None:
            return None, None
        host, _, text = peer.rpartition(":")
        port = int(text)
        # gloo prints the port as it lies in the socket address: its bytes are swapped on most machines.
        for candidate in (port, (port & 0xFF) << 8 | port >> 8):
            rank = self._rank_at.get((host.strip("[]"), candidate))
            if rank is not None:
                return f"{host}:{candidate}", rank
        return peer, None

    @property
    def fails_silently(self) -> bool:
        """Whether `error` must be polled: with NCCL no call raises the failure of a collective."""
        return self._backend == "nccl"

    def error(self) -> str | None:
        """A failure that the groups report only when polled; None without one. From any thread."""
        return nccl.first_error(_groups()) if self.fails_silently and self._joined else None

    def leave_together(self, limit_s: float) -> None:
        """Wait until every rank is about to leave by an error of its own code, at most `limit_s`; an abort ends it.

        Code that fails, or is refused, does so on all ranks. The first one to leave would otherwise be a lost peer to
        those that still connect to it, and they would report that instead of the error.
        """
        if self._store is None:
            return
        key = f"elastic/{self.spec.generation}/leaving"
        try:
            if self._store.add(key, 1) == self.spec.world_size:
                self._store.set(f"{key}/all", "")
            self._store.wait([f"{key}/all"], timedelta(seconds=limit_s))
        except RuntimeError as error:
            logger.debug("generation %d is left before all ranks fail: %s", self.spec.generation, error)

    def abort(self) -> int:
        """Release every thread that is blocked in a collective of this generation; returns the sockets shut down."""
        with self._abort_lock:
            if not self._joined:
                return 0
            aborts = self._abort_all() if self.fails_silently else []
            _join_all(aborts, _ABORT_S)
            if self._waits is not None:
                self._waits.abort()
            cut = sum(self._cut(found) for found in sockets.tcp_sockets() if self._owns(found))
            _join_all(aborts, _ABORT_LIMIT_S)
            return cut

    def sever(self) -> None:
        """From the thread whose collective has failed: nothing that its code still begins reaches a peer.

        A peer may be in the collective that has failed here, and wait for fewer bytes than another one sends: gloo ends
        its process then (as of torch 2.13: "Received data size doesn't match expected size"). Communicators of NCCL,
        whose calls raise nothing by themselves, are aborted where an error is found.
        """
        with self._abort_lock:
            if self._joined and not self.fails_silently:
                for found in sockets.tcp_sockets():
                    if self._owns(found):
                        sockets.shut_down(found, True)

    def _cut(self, found: TcpSocket) -> bool:
        now = time.monotonic()
        both = now - self._cut_at.setdefault(found.inode, now) >= _READING_FIRST_S
        return sockets.shut_down(found, both)

    def connects_to(self, addresses: Iterable[Address]) -> None:
        """Connections that this rank makes to these are shut down by an abort, too."""
        self._peers_listening |= frozenset(addresses)

    def close_in_child(self) -> Callable[[int], None]:
        """For data workers, which inherit this process's descriptors: closes the groups' sockets in them.

        Otherwise the connections would outlive this process, and its peers would notice its death too late. Those of
        earlier generations are closed first: nobody would in the child.
        """
        await_dropped()
        return CloseSockets([found for found in sockets.tcp_sockets() if found.inode not in self._foreign])

    def close(self) -> list[dist.ProcessGroup]:
        """Destroy every group and the store. Never raises: a group that fails to close is logged. Idempotent.

        Returns groups of gloo's, whose connections are closed when nothing refers to them any more: see `drop_later`.
        """
        if not self._joined:
            return []
        held = list(_groups()) if self._backend == "gloo" else []
        try:
            if dist.is_initialized():
                self._hooks.destroy_groups()
        except (RuntimeError, ValueError, AssertionError) as error:
            logger.warning("generation %d: groups did not close cleanly: %s", self.spec.generation, error)
        self._store, self._along = None, {}
        before, torchs = self._excepthooks
        if sys.excepthook is torchs:
            # torch puts the rank before each line of a traceback, one more time for every group that there was.
            sys.excepthook = before
        with self._abort_lock:
            self._joined = False
        if self._waits is not None:
            self._waits.remove()
        release_store(self.rendezvous)
        return held

    # -- inside -------------------------------------------------------------------------------------------------------

    def _connect(self, name: str) -> None:
        """NCCL's communicators of all groups, when every rank is here: see `nccl`. Collective."""
        assert self._store is not None
        assert self._communicators is not None
        await_all(self._store, f"elastic/{self.spec.generation}/connect/{name}", self.spec.world_size)
        self._communicators.connect(_groups())

    def _abort_all(self) -> list[threading.Thread]:
        """All groups concurrently: an abort waits for its group's kernels, which may be queued behind another group's
        (https://github.com/pytorch/pytorch/issues/119797). Repeated at each call: a group may connect after an abort.
        """
        threads = []
        for group in [group for group in _groups() if group not in self._aborting]:
            self._aborting.add(group)
            threads.append(threading.Thread(target=self._abort, args=(group,), name="nccl-abort", daemon=True))
            threads[-1].start()
        return threads

    def _abort(self, group: dist.ProcessGroup) -> None:
        try:
            group.abort()
        except (RuntimeError, AttributeError) as error:
            logger.warning("a group could not be aborted: %s", error)
        finally:
            self._aborting.discard(group)

    def _timeout(self) -> timedelta:
        return timedelta(seconds=self.spec.collective_timeout_s)

    def _set_environment(self) -> None:
        nccl.limit_connecting(self.spec.collective_timeout_s)
        # torchrun's variables: without all five, DeepSpeed looks for MPI.
        os.environ.update(
            RANK=str(self.spec.rank),
            WORLD_SIZE=str(self.spec.world_size),
            LOCAL_RANK=str(self.local_rank),
            MASTER_ADDR=self.rendezvous.host,
            MASTER_PORT=str(self.rendezvous.port),
        )

    def _exchange_addresses(self) -> None:
        assert self._store is not None
        mine = [found for found in sockets.tcp_sockets() if found.inode not in self._foreign]
        self._listening = frozenset(found.local for found in mine if found.listening)
        prefix = f"elastic/{self.spec.generation}/addresses/"
        peers = exchange(self._store, prefix, self.spec.rank, self.spec.world_size, mine)
        self._peers_listening, self._rank_at = peers.listening, peers.rank_at

    def _owns(self, found: TcpSocket) -> bool:
        if found.listening or found.peer is None or found.inode in self._foreign:
            return False
        if found.peer[1] == self.rendezvous.port:
            return True
        if found.local[1] == self.rendezvous.port:
            # The store's side of a peer's connection: the peer closes it.
            return False
        return self._building or found.local in self._listening or found.peer in self._peers_listening


def drop_later(groups: list[dist.ProcessGroup]) -> None:
    """Drop destroyed groups of gloo's, each on a thread of its own; empties the list.

    gloo closes a group's connections one after another and waits up to 10 ms for each (its thread sleeps so long in
    `epoll_wait`, as of torch 2.13): 0.05 s in a planned change of four workers. A later generation takes the sockets
    for the process's own, as every one that is older.
    """
    _closing[:] = [thread for thread in _closing if thread.is_alive()]
    while groups:
        held = [groups.pop()]
        # No daemon: the process does not end while it is at it.
        _closing.append(threading.Thread(target=held.clear, name="elastic-close", daemon=False))
        _closing[-1].start()


def are_held(groups: list[dist.ProcessGroup]) -> bool:
    """Does anything but the list refer to one of them?"""
    # The list, the variable, and the argument of the call.
    return any(sys.getrefcount(group) > 3 for group in groups)


def await_dropped(limit_s: float = _DROPPED_S) -> bool:
    """Wait until groups of earlier generations are closed; False where they are not within `limit_s`."""
    _join_all(_closing, limit_s)
    return not any(thread.is_alive() for thread in _closing)


class CloseSockets:
    """Closes descriptors if they are still the sockets that they were when this was made."""

    def __init__(self, found: list[TcpSocket]) -> None:
        self._found = found

    def __call__(self, _: int) -> None:
        for found in self._found:
            if sockets.inode_of(found.fd) == found.inode:
                os.close(found.fd)


def _join_all(threads: list[threading.Thread], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _begun(group: dist.ProcessGroup) -> int:
    try:
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]  # torch's stubs lack it
    except RuntimeError:
        # Its backend does not count, or it was aborted.
        return 0


def _groups() -> list[dist.ProcessGroup]:
    return list(dist.distributed_c10d._world.pg_map)
