"""The process groups of one generation: joined through a store of its own, released from any thread, left clean.

gloo on the CPU, NCCL on CUDA. Everything that touches private parts of torch.distributed or DeepSpeed's group
bookkeeping is in this module, `sockets` and `cleanup`.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from elastic.comm import lost_peers, sockets
from elastic.comm.peer_addresses import exchange
from elastic.comm.rendezvous import connect, host_store, release_store
from elastic.comm.sockets import Address, TcpSocket
from elastic.core.generation_spec import GenerationSpec, Rendezvous
from elastic.training import cleanup

logger = logging.getLogger(__name__)

__all__ = ["CloseSockets", "ProcessGroup", "backend_and_device", "host_store", "outlive_peers", "release_store"]

# torch's own reactions to a failed NCCL collective (ProcessGroupNCCL.hpp), all of which end the process or delay its
# cleanup.
_NCCL = {
    # Do not end the process when a collective fails or times out.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # Do not spend a minute on dumps, during which a group cannot be closed.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
    # The watchdog thread would throw CUDA errors that the training thread raises too, and so end the process: a device
    # assert in user code would look like a lost worker.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # The monitor thread ends the process when the watchdog thread is stuck or gone; heartbeats and hang limits do that.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
# An abort takes a second; one that hangs must not keep whoever asked for it.
_ABORT_LIMIT_S = 10.0


def outlive_peers() -> None:
    """Keep torch from ending this process when a peer or a collective fails. Call it before the first group is made.

    Variables that the environment sets already are kept.
    """
    for name, value in _NCCL.items():
        os.environ.setdefault(name, value)


def backend_and_device(local_rank: int = 0) -> tuple[str, torch.device]:
    """The backend and device that DeepSpeed's accelerator stands for ("gloo" and cpu, "nccl" and cuda:N)."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return "gloo", torch.device("cpu")
    return accelerator.communication_backend_name(), torch.device(accelerator.device_name(local_rank))


class ProcessGroup:
    """Call order, on the training thread: 1. `join` 2. `seal` after deepspeed.initialize 3. `leave`.
    `sweep` may be called by any thread at any time and any number of times.
    """

    def __init__(self, spec: GenerationSpec, rendezvous: Rendezvous, local_rank: int = 0) -> None:
        self.spec = spec
        self.rendezvous = rendezvous
        self.local_rank = local_rank
        self._store: Store | None = None
        self._backend = ""
        self._aborting: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
        self._foreign: frozenset[str] = frozenset()
        self._listening: frozenset[Address] = frozenset()
        self._peers_listening: frozenset[Address] = frozenset()
        self._rank_at: Mapping[Address, int] = {}
        # While groups are being built nobody has published addresses: every new socket counts as the groups' own.
        self._building = False
        self._joined = False
        # A sweep that began in this generation must not see the sockets of the next one.
        self._sweeping = threading.Lock()

    def join(self, check: Callable[[], None]) -> torch.device:
        """Connect to the store, form the world group, let DeepSpeed adopt it; returns the device of this rank.

        `check` raises when the generation was ended meanwhile. Raises torch's DistError, or a RuntimeError of gloo.
        """
        backend, device = backend_and_device(self.local_rank)
        self._backend = backend
        cleanup.warm_up()
        cleanup.clear_stage3_globals()
        _quiet_deepspeed()
        self._set_environment()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._foreign = frozenset(found.inode for found in sockets.tcp_sockets())
        self._building = True
        self._joined = True
        check()
        self._store = connect(self.rendezvous, self.spec.collective_timeout_s, check)
        # An abort before this line found no socket to shut down; one after it finds the store's.
        check()
        # Groups are named by this counter and meet under their names. An attempt that was aborted half-way has moved it
        # on in this process alone.
        dist.distributed_c10d._world.group_count = 0
        dist.init_process_group(
            backend,
            store=PrefixStore(f"generation{self.spec.generation}", self._store),
            rank=self.spec.rank,
            world_size=self.spec.world_size,
            timeout=self._timeout(),
            # Bound, NCCL splits later groups off this one, which fails without peers (DeepSpeed issue 8248).
            device_id=device if device.type == "cuda" and self.spec.world_size > 1 else None,
        )
        _adopt(backend)
        return device

    def seal(self) -> None:
        """After DeepSpeed made its groups: set their timeouts, agree on whose sockets are whose. Collective."""
        for group in list(_groups()):
            # DeepSpeed's clone of the world group ignores the timeout that the world group was made with.
            dist.distributed_c10d._set_pg_timeout(self._timeout(), group)
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
        """Whether `error` has to be asked: no call raises what becomes of a collective."""
        return self._backend == "nccl"

    def error(self) -> str | None:
        """What has befallen this generation's groups, where that is known only to whoever asks. From any thread."""
        return lost_peers.first_error(_groups()) if self.fails_silently and self._joined else None

    def sweep(self) -> int:
        """Release whatever is blocked in this generation's collectives; the number of sockets shut down."""
        with self._sweeping:
            if not self._joined:
                return 0
            if self._backend == "nccl":
                self._abort_all()
            return sum(sockets.shut_down(found) for found in sockets.tcp_sockets() if self._owns(found))

    def close_in_child(self) -> Callable[[int], None]:
        """For data workers, which inherit this process's descriptors: closes the groups' sockets in them.

        Otherwise the other ranks would not see the death of this process until its data workers have noticed it.
        """
        return CloseSockets([found for found in sockets.tcp_sockets() if found.inode not in self._foreign])

    def leave(self) -> None:
        """Destroy every group and the store. Never raises: a group that fails to close is logged."""
        if not self._joined:
            return
        try:
            _destroy_groups()
        except (RuntimeError, ValueError, AssertionError) as error:
            logger.warning("generation %d: groups did not close cleanly: %s", self.spec.generation, error)
        self._store = None
        with self._sweeping:
            self._joined = False
        release_store(self.rendezvous)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _abort_all(self) -> None:
        """At the same time: an abort waits for its group's kernels, which may stand behind those of another group
        (https://github.com/pytorch/pytorch/issues/119797). Again at each sweep: a group may connect after an abort."""
        deadline = time.monotonic() + _ABORT_LIMIT_S
        threads = []
        for group in [group for group in _groups() if group not in self._aborting]:
            self._aborting.add(group)
            threads.append(threading.Thread(target=self._abort, args=(group,), name="nccl-abort", daemon=True))
            threads[-1].start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

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
        # DeepSpeed looks for MPI unless all five are set.
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
            # The hosted store's side of the others' connections: they are theirs to close.
            return False
        return self._building or found.local in self._listening or found.peer in self._peers_listening


class CloseSockets:
    """Closes descriptors if they are still the sockets that they were when this was made."""

    def __init__(self, found: list[TcpSocket]) -> None:
        self._found = found

    def __call__(self, _: int) -> None:
        for found in self._found:
            if sockets.inode_of(found.fd) == found.inode:
                os.close(found.fd)


def _groups() -> list[dist.ProcessGroup]:
    return list(dist.distributed_c10d._world.pg_map)


def _quiet_deepspeed() -> None:
    """Data goes to stdout, talk to stderr."""
    for handler in logging.getLogger("DeepSpeed").handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
            handler.setStream(sys.stderr)


def _adopt(backend: str) -> None:
    import deepspeed

    # The group exists: DeepSpeed makes its wrapper of it and never initialises one itself.
    deepspeed.comm.init_distributed(dist_backend=backend, dist_init_required=False, verbose=False)


def _destroy_groups() -> None:
    import deepspeed

    if not dist.is_initialized():
        return
    if deepspeed.comm.comm.cdb is None:
        dist.destroy_process_group()
        return
    # Not torch's: that one leaves DeepSpeed's clone of the world group alive.
    deepspeed.comm.destroy_process_group()
