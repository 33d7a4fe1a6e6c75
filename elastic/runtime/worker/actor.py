"""The worker actor: one persistent process with one accelerator.

Generations run one after the other on one thread, so that imports, compiled kernels and the device context stay. Every
method returns at once; outcomes are reported through the outbox.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import ray

from elastic.core import events as ev
from elastic.core.errors import ElasticError, Fenced, StorageError, UsageError
from elastic.core.settings import RunSettings
from elastic.runtime import handed_environment
from elastic.runtime.messages import Item, NodeFacts
from elastic.runtime.node.heartbeats import HeartbeatSender
from elastic.runtime.train_function import Entry
from elastic.runtime.worker import codec, ray_train_face
from elastic.runtime.worker.delivery import Delivery
from elastic.runtime.worker.device import bind_to_device, check_device, check_health, choose, look
from elastic.runtime.worker.device_watch import watch_devices
from elastic.runtime.worker.logs import begin_generation, keep_output
from elastic.runtime.worker.outbox import Outbox

if TYPE_CHECKING:
    from elastic.checkpoint.memory.snapshot_client import SnapshotClient
    from elastic.checkpoint.source import CheckpointSource
    from elastic.checkpoint.storage import CheckpointStore
    from elastic.checkpoint.writer import BackgroundWriter
    from elastic.core.generation_spec import GenerationSpec, MemoryPlan, Rendezvous
    from elastic.core.policy.device_health import Fault
    from elastic.runtime.messages import Assembled
    from elastic.runtime.worker.ray_coordinator import RayCoordinator
    from elastic.training.in_loop.rehearsal import Rehearsal
    from elastic.training.loop import GenerationRunner
    from elastic.training.result import GenerationResult

logger = logging.getLogger(__name__)

_ASK_AGAIN_S = 0.2
# A worker that waits for its first generation asks for passes to rehearse so often.
_ASKS_EVERY_S = 10.0
_ANSWER_LIMIT_S = 5.0
# A holder that sends no byte for this long counts as gone.
_READ_TIMEOUT_S = 10.0
# Of the limit for a worker's start: imports and kernels come before.
_SET_UP_SHARE = 0.6


@dataclass
class _Current:
    generation: int
    coordinator: RayCoordinator
    runner: GenerationRunner


# After these a worker has nothing more to print; and how long its output may take to storage then.
_LAST = frozenset(("finished", "user_error", "usage_error"))
_FLUSH_S = 5.0
_COMMANDS = frozenset(("host_store", "begin", "end", "propose_stop", "commit_stop", "ping"))


class WorkerActor:
    """Ray actor with several threads; created by the executor, detached, never restarted by Ray.

    Call order: `preload`, where there is time for it; `prepare` once; then for each generation `host_store` (rank 0
    only), `begin`, and `end` to abort it, or `propose_stop` and `commit_stop` for a planned end. `ping` at any time;
    `reattach` by a restarted controller. All but `preload`, `prepare` and `reattach` come through `command` or
    `handed`, which refuse a controller that was replaced.
    """

    def __init__(self, worker: int, settings: RunSettings, entry: Entry, controller: Any, token: bytes) -> None:
        handed_environment.take()
        self._worker = worker
        self._settings = settings
        self._entry = entry
        self._controller = controller
        self._preparing = threading.Lock()
        # They have begun.
        self._imports = False
        self._prepared: dict[str, Any] | None = None
        self._lock = threading.Lock()
        self._current: _Current | None = None
        self._over = 0
        self._incarnation = 0
        self._last_step = 0
        self._stores: dict[int, Rendezvous] = {}
        self._work: queue.SimpleQueue[_Current] = queue.SimpleQueue()
        self._heartbeats: HeartbeatSender | None = None
        self._delivery = Delivery(worker, controller, settings.failures.abort_timeout_s)
        self._outbox = Outbox(self._delivery, on_fenced=lambda: self._quit("it was removed from the run"))
        self._store: CheckpointStore | None = None
        self._writer: BackgroundWriter | None = None
        self._function: Callable[..., Any] | None = None
        # The function waits for its first generation, or has ended without one.
        self._set_up = threading.Event()
        self._training_thread: int | None = None
        # Its first generation, which the function has not taken yet.
        self._begun: GenerationRunner | None = None
        self._token = token
        self._node: NodeFacts | None = None
        self._memory: SnapshotClient | None = None
        # Output goes to the run's folder.
        self._flush_output: Callable[[float], Any] | None = None

    # --- called by the controller ---

    def preload(self) -> None:
        """Import everything while the node's agent starts. Nobody waits for it: what fails here fails in `prepare`."""
        from elastic.runtime.worker.preload import preload

        with self._preparing:
            if self._prepared is None:
                self._before_imports()
                preload(self._settings.engine, self._settings.snapshots.enabled)

    def prepare(self, node: NodeFacts, relay: Any = None) -> dict[str, Any]:
        """Import everything, load the user's function, start heartbeats, and let the function do its set-up. `relay` is
        the node's agent where step reports go through it.

        Raises UsageError for a bad entry point; UsageError or RuntimeError where torch does not use the GPU that Ray
        reserves.

        A controller that was restarted meanwhile calls it again and gets the first answer.
        """
        with self._preparing:
            if self._prepared is None:
                self._delivery.through(relay)
                self._prepared = self._prepare(node)
            return self._prepared

    def _prepare(self, node: NodeFacts) -> dict[str, Any]:
        self._node = node
        gpus, address, failures = ray.get_gpu_ids(), _address(), self._settings.failures
        self._heartbeats = HeartbeatSender(
            self._worker,
            node.mailbox,
            failures.heartbeat_s,
            failures.suspect_after_s * 5,
            lambda: self._quit("no agent"),
        )
        self._before_imports()
        self._import()
        if gpus:
            where = f"{ray.get_runtime_context().get_node_id()[:8]} ({address})"
            check_device(gpus, look(self._settings.engine), os.environ, where)
            check_health(gpus, os.environ, where)
            bind_to_device(gpus, self._settings.numa_binding, os.environ, where)
            watch_devices(gpus, self._settings.device_faults, os.environ, self._device_failed)
        self._function = self._entry.load()
        training = threading.Thread(target=self._train, name="elastic-training", daemon=True)
        training.start()
        self._training_thread = training.ident
        if failures.in_loop:
            self._await_set_up(failures.worker_start_timeout_s * _SET_UP_SHARE)
        return {"pid": os.getpid(), "host": address}

    def _await_set_up(self, share_s: float) -> None:
        """A generation that begins with this worker does not wait for its set-up then. Of a longer one that stands
        still, or that nobody trains beside, the rest is waited for there, within its own limit."""
        from elastic.runtime.worker.work_watch import SetUpWatch

        watch = SetUpWatch()
        while not self._set_up.wait(share_s):
            if not watch.works() or not self._asked(self._controller.setting_up.remote(self._worker)):
                return

    def command(self, incarnation: int, name: str, *args: Any) -> Any:
        """One of the methods below, for the controller of that incarnation.

        Raises Fenced when a newer controller has been heard of: one that was frozen or cut off may reach its workers
        before it reaches the journal, which is where it would learn of its successor.
        """
        return self._obey(incarnation, name, args, many=False)

    def handed(self, incarnation: int, name: str, *args: Any) -> Any:
        """`command` by the node's agent, as where there are many workers: what each says at the start and at the end of
        a generation goes back by the agent, too."""
        return self._obey(incarnation, name, args, many=True)

    def _obey(self, incarnation: int, name: str, args: tuple[Any, ...], many: bool) -> Any:
        if name not in _COMMANDS:
            raise UsageError(f"a worker has no command {name!r}")
        self._heed(incarnation)
        self._delivery.many = many
        return getattr(self, name)(*args)

    def _heed(self, incarnation: int) -> None:
        with self._lock:
            if incarnation < self._incarnation:
                newest = self._incarnation
                raise Fenced(f"controller {incarnation} was replaced: worker {self._worker} obeys controller {newest}")
            self._incarnation = incarnation

    def host_store(self, generation: int) -> Rendezvous:
        """Open the rendezvous store of a generation in this process (that of rank 0)."""
        from elastic.comm.rendezvous import host_store

        with self._lock:
            if generation not in self._stores:
                self._stores[generation] = host_store(_address())
            return self._stores[generation]

    def begin(
        self, shared: GenerationSpec, rendezvous: Rendezvous, rank: int, memory: MemoryPlan | None = None
    ) -> None:
        """`shared` is of all ranks, `rank` and `memory` are this one's. No effect the second time."""
        from elastic.runtime.worker.ray_coordinator import RayCoordinator
        from elastic.runtime.worker.work_watch import WorkWatch
        from elastic.training.loop import GenerationRunner

        spec = shared.of_rank(rank, memory)
        with self._lock:
            running = self._current.generation if self._current else 0
            if spec.generation <= max(self._over, running):
                return
            assert self._writer is not None
            assert self._store is not None
            coordinator = RayCoordinator(
                spec, self._worker, self._outbox, self._store, self._writer,
                self._settings.failures, self._memory, self._snapshot, self._shard_server(),
            )  # fmt: skip
            runner = GenerationRunner(spec, coordinator, rendezvous, on_result=self._announce)
            self._current = _Current(spec.generation, coordinator, runner)
            WorkWatch(runner.generation.scope, self._training_thread).start()
            self._work.put(self._current)

    def end(self, generation: int, cause: str) -> None:
        """Abort the generation and any older one. The answer is WorkerLeft, at once if none runs here."""
        with self._lock:
            current = self._current
            self._over = max(self._over, generation)
            if current is None or current.generation > generation:
                self._post(ev.WorkerLeft(generation, self._worker, self._last_step))
                return
        current.coordinator.end(cause)
        # The answer means that the command has arrived: over NCCL an abort takes seconds.
        threading.Thread(target=current.runner.abort, args=(cause,), name="elastic-end", daemon=True).start()

    def propose_stop(self, generation: int) -> tuple[int, bool] | None:
        with self._lock:
            current = self._current
        return current.coordinator.propose_stop() if current and current.generation == generation else None

    def commit_stop(self, generation: int, step: int, durable: bool, last: bool = False) -> None:
        with self._lock:
            current = self._current
            if current is None and generation <= self._over:
                # The controller was restarted before it received WorkerLeft, and asks again.
                self._post(ev.WorkerLeft(generation, self._worker, self._last_step))
        if current and current.generation == generation:
            current.coordinator.commit_stop(step, durable, last)

    def ping(self) -> bool:
        return True

    def reattach(self, incarnation: int) -> int:
        """A controller was restarted: messages that it may lack are sent again. Returns the newest generation that
        this worker knows of; 0 for none."""
        self._heed(incarnation)
        self._outbox.restarted(incarnation)
        with self._lock:
            running = self._current.generation if self._current else 0
            return max(self._over, running, *self._stores)

    # --- the training thread ---

    def _train(self) -> None:
        from elastic.core.generation_spec import GenerationSpec
        from elastic.engines.select import engine_kind
        from elastic.training.in_loop.ahead import Ahead
        from elastic.training.in_loop.function_call import FunctionCall

        ray_train_face.install()
        settings = self._settings
        assert self._function is not None
        if not settings.failures.in_loop:
            for calls in count():
                runner = self._taken()
                if calls:
                    self._function_left("failures.in_loop is false")
                self._left(runner, runner.run(self._function, self._entry.config))
        call = FunctionCall(self._function, self._entry.config, self._next, self._function_left)
        kind = engine_kind(settings.engine)
        # One that shares a model computes nothing by itself.
        alone = GenerationSpec.alone(settings) if settings.mesh.cells == (1,) else None
        mesh = None if settings.mesh.choices else settings.mesh.mesh
        first = Ahead(
            settings.run_id, settings.seed, kind, self._first, self._begins,
            self._passes, self._rehearsed, self._expected_place, alone, self._recording, mesh,
        )  # fmt: skip
        self._left(*call.run(first))
        while True:
            self._left(*call.run(self._taken()))

    def _first(self, rehearsal: Rehearsal | None) -> GenerationRunner:
        """`rehearsal`: had nothing to rehearse so far. A spare waits from before the run's first step."""
        while rehearsal is not None and not rehearsal.over and not self._begins(_ASKS_EVERY_S):
            rehearsal()
        self._begins(None)
        begun, self._begun = self._begun, None
        assert begun is not None
        return begun

    def _begins(self, seconds: float | None) -> bool:
        """The function waits: has its first generation begun, now or within `seconds`?"""
        self._set_up.set()
        if self._begun is None:
            try:
                self._begun = self._taken(seconds)
            except queue.Empty:
                return False
        return True

    def _passes(self) -> Sequence[Any]:
        """Those that others make. None where the controller does not answer: the first step compiles, then."""
        return self._asked(self._controller.passes.remote()) or ()

    def _recording(self) -> bytes | None:
        """Where the controller does not answer, the function is given it when it has joined."""
        found: bytes | None = self._asked(self._controller.recording.remote())
        return found

    def _expected_place(self) -> tuple[int, int] | None:
        """Where the controller does not answer, the function waits for its place."""
        found: tuple[int, int] | None = self._asked(self._controller.expected_place.remote(self._worker))
        return found

    def _asked(self, answer: Any) -> Any:
        """What only saves time; None where the controller does not answer."""
        try:
            return ray.get(answer, timeout=_ANSWER_LIMIT_S)
        except (ray.exceptions.RayError, OSError) as error:
            logger.debug("the controller has not answered: %s", error)
            return None

    def _rehearsed(self, what: str) -> None:
        self._outbox.put(Item("rehearsed", {"worker": self._worker, "what": what}))

    def _next(self, runner: GenerationRunner, result: GenerationResult) -> GenerationRunner:
        """The user's function stays in its loop; for the controller this worker has left the generation."""
        self._left(runner, result)
        return self._taken()

    def _taken(self, limit_s: float | None = None) -> GenerationRunner:
        """The next generation, once there is one. Raises queue.Empty after `limit_s`."""
        runner = self._work.get(timeout=limit_s).runner
        if self._flush_output is not None:
            begin_generation(runner.spec.generation, runner.spec.rank, runner.spec.world_size)
        return runner

    def _function_left(self, why: str) -> None:
        with self._lock:
            generation = self._current.generation if self._current else self._over
        self._outbox.put(Item("function_left", {"generation": generation, "worker": self._worker, "reason": why}))

    def _announce(self, result: GenerationResult) -> None:
        """Called before this rank closes its groups: the first cause must be reported before its consequences."""
        event = codec.outcome(result, self._current.generation if self._current else 0, self._worker)
        if event is not None:
            self._post(event)

    def _left(self, runner: GenerationRunner, result: GenerationResult) -> None:
        from elastic.comm.rendezvous import release_store

        if self._flush_output is not None and result.kind in _LAST:
            # The process may be ended as soon as it has left.
            self._flush_output(_FLUSH_S)
        with self._lock:
            self._current = None
            generation = runner.spec.generation
            self._over = over = max(self._over, generation)
            self._last_step = result.step
            for old in [number for number in self._stores if number <= generation]:
                release_store(self._stores.pop(old))
        if not runner.clean:
            self._post(ev.WorkerDied(self._worker, "engine or device unusable; restarting the process"))
        elif result.kind != "finished" or over > generation:
            # For the generation that was to end, if it is newer than the one that ran here.
            self._post(ev.WorkerLeft(over, self._worker, result.step))

    # --- inside ---

    def _before_imports(self) -> None:
        if self._imports:
            return
        self._imports = True
        if self._entry.keep_prints:
            self._flush_output = keep_output(self._settings.storage_url, self._settings.run_id, self._worker)
        choose(ray.get_gpu_ids(), os.environ)
        if _address().startswith("127."):
            # A cluster on one machine: the host name may resolve to an address that is reachable only from outside.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        # DeepSpeed calls renamed torch functions at every step; users cannot change that.
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")

    def _import(self) -> None:
        """Slow imports, before this worker counts as ready. None is left where it was forked by the node's server."""
        from elastic.checkpoint.storage import CheckpointStore
        from elastic.checkpoint.writer import BackgroundWriter
        from elastic.comm.nccl import outlive_peers
        from elastic.runtime.worker.preload import preload
        from elastic.training import cleanup
        from elastic.training.watch import memory_use

        kind = preload(self._settings.engine, self._settings.snapshots.enabled)
        outlive_peers()
        # Kernels are compiled now, while nobody waits for this worker: within a join it would count as a hang.
        cleanup.warm_up(kind, self._settings)
        memory_use.note_process()
        failures = self._settings.failures
        if self._settings.snapshots.enabled:
            from elastic.checkpoint.memory.snapshot_client import SnapshotClient
            from elastic.training.state.pins import pinning

            assert self._node is not None
            self._memory = SnapshotClient(self._node.memory_name, self._token, pinning(self._settings.engine))
        self._store = CheckpointStore(
            self._settings.checkpoint.url, self._settings.run_id, timeout_s=failures.storage_timeout_s
        )
        self._writer = BackgroundWriter(
            self._store,
            on_written=lambda record: self._outbox.put(Item("shard", record, replay=True)),
            on_failed=self._save_failed,
            backoff_s=failures.storage_backoff_s,
            backoff_limit_s=failures.storage_backoff_limit_s,
        )

    def _snapshot(
        self, identifier: str, limit_s: float, check: Callable[[float], None], moved: Callable[[int], None]
    ) -> CheckpointSource:
        """The source of a snapshot in the nodes' memory. Raises IntegrityError or StorageError.

        `check(seconds)` waits, and raises when the generation is over.
        """
        from elastic.checkpoint.memory.source import MemorySource, nearest

        assert self._node is not None
        assembled = self._assembled(identifier, limit_s, check)
        own = self._node.memory, self._node.memory_name
        holders = {rank: nearest(copies, *own, rank) for rank, copies in enumerate(assembled.copies)}
        manifest = assembled.manifest()
        return MemorySource(
            lambda _: manifest, holders, self._token,
            timeout_s=_READ_TIMEOUT_S, limit_s=limit_s, check=lambda: check(0.0), moved=moved,
        )  # fmt: skip

    def _shard_server(self) -> tuple[tuple[str, int], bytes] | None:
        address = None if self._node is None else self._node.parameters
        return None if address is None else (address, self._token)

    def _assembled(self, identifier: str, limit_s: float, check: Callable[[float], None]) -> Assembled:
        """Ask the controller; a restarting controller is waited for."""
        deadline = time.monotonic() + limit_s
        asked = self._controller.snapshot.remote(identifier)
        while True:
            check(0.0)
            try:
                found: Assembled = ray.get(asked, timeout=_ASK_AGAIN_S)
                return found
            except ray.exceptions.RayTaskError as error:
                cause = error.cause
                raise cause if isinstance(cause, ElasticError) else StorageError(str(cause)) from None
            except (ray.exceptions.RayError, OSError) as error:
                if time.monotonic() > deadline:
                    raise StorageError(
                        f"the controller did not report the holders of snapshot {identifier}: {error}"
                    ) from error
                if not isinstance(error, ray.exceptions.GetTimeoutError):
                    check(_ASK_AGAIN_S)
                    asked = self._controller.snapshot.remote(identifier)

    def _save_failed(self, step: int, error: BaseException, retry_s: float | None) -> None:
        self._post(ev.SaveFailing(step, str(error), retry_s or 0.0, self._worker))

    def _device_failed(self, gpu: str, found: Fault) -> None:
        self._post(ev.DeviceFailed(self._worker, gpu, found.evidence, found.unfit))

    def _post(self, event: ev.Event) -> None:
        self._outbox.put(Item("event", ev.to_json(event)))

    def _quit(self, why: str) -> None:
        logger.warning("worker %d ends itself: %s", self._worker, why)
        with contextlib.suppress(Exception):
            logging.shutdown()
        # The training thread may be blocked in a collective for ever.
        os._exit(0)


def _address() -> str:
    """The address at which other nodes reach this one."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
