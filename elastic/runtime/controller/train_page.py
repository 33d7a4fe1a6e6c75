"""The run on the Train page of Ray's dashboard, where the user has asked Ray Train for it (`ENABLED_BY`).

Ray Train 2.60 keeps its runs in a detached actor, which the dashboard reads: `ray.train.v2._internal.state`, a private
API. This module gives it a run with one attempt per generation. `view` is the run at one moment and `merge` what is to
be told of it, both pure; the telling has a thread of its own (`SinkFeed`), and whatever happens there is logged once.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any

import ray

from elastic.core.run.phase import FINISHED, STOPPED, Ending, Finished, Joining, Waiting
from elastic.core.run.state import RunState
from elastic.core.settings import RunSettings
from elastic.observe.records import Record
from elastic.observe.sinks import RunInfo, SinkFeed
from elastic.runtime.worker.logs import log_name
from elastic.store.address import local_root

logger = logging.getLogger(__name__)

# Ray Train's own switch, off by default there and here. The driver reads it.
ENABLED_BY = "RAY_TRAIN_ENABLE_STATE_TRACKING"
# An answer of the state actor takes milliseconds, its first start some seconds.
_ANSWER_LIMIT_S = 30.0
# Views that wait while the actor does not answer.
_WAITING = 100
# Ray's actor forgets nothing: of all generations but the newest ones it is given no workers.
_WHOLE = 20
_OVER = frozenset(("FINISHED", "ERRORED", "ABORTED"))
_ENDS = {FINISHED: "FINISHED", STOPPED: "ABORTED"}
_NS = 1_000_000_000


def enabled(environment: Mapping[str, str] = os.environ) -> bool:
    """As Ray Train reads its switch."""
    return environment.get(ENABLED_BY, "").lower() in ("1", "true")


class TrainPage:
    """The controller's side: `show` after each of its turns, `close` at the end of the run."""

    def __init__(
        self,
        settings: RunSettings,
        config: Mapping[str, Any] | None,
        info: RunInfo,
        secrets: Sequence[str],
        actor_of: Callable[[int], str],
    ) -> None:
        """`actor_of` gives the id of a worker's actor; `secrets` are texts that must not be told."""
        context = ray.get_runtime_context()
        run = run_record(settings, config, context.get_job_id(), context.get_actor_id() or "")
        self._feed = SinkFeed("Ray's Train page", StateActorSink(run), info, secrets=secrets)
        self._actor_of = actor_of
        self._shown: tuple[Any, ...] = ()

    def show(self, state: RunState, error: str | None = None) -> None:
        """Tell what has changed, if anything has that the page shows; returns at once. `error` is a traceback."""
        reason = getattr(state.phase, "reason", "")
        sign = (type(state.phase), state.generation, reason, state.fleet.shortage)
        if sign != self._shown:
            self._shown = sign
            self._feed.put(view(state, self._actor_of, time.time(), error))

    def close(self, limit_s: float) -> None:
        if not self._feed.close(limit_s):
            logger.warning("Ray's Train page may not show how the run has ended: it has not answered in time")


# --- what the page shows ---


def run_record(settings: RunSettings, config: Mapping[str, Any] | None, job: str, controller: str) -> dict[str, Any]:
    """The part of Ray's `TrainRun` that stays the same."""
    execution = {
        "resource_limits": {}, "exclude_resources": {}, "preserve_order": False, "actor_locality_enabled": False,
        "verbose_progress": False,
    }  # fmt: skip
    resources, scaling = dict(settings.resources_per_worker), settings.scaling
    return {
        "id": settings.run_id, "name": settings.run_id, "job_id": job, "controller_actor_id": controller,
        "framework_versions": {"ray": ray.__version__},
        "run_settings": {
            "train_loop_config": dict(config or {}),
            "backend_config": {"framework": "torch", "config": {"engine": settings.engine}},
            "scaling_config": {
                "num_workers": (scaling.min_workers, scaling.max_workers), "use_gpu": bool(resources.get("GPU")),
                "resources_per_worker": resources, "placement_strategy": "PACK", "use_tpu": False,
            },
            "datasets": [],
            "data_config": {
                "datasets_to_split": [], "data_execution_options": {"default": execution},
                "enable_shard_locality": False,
            },
            "run_config": {
                "name": settings.run_id, "storage_path": settings.storage_url, "worker_runtime_env": {},
                # Ray restarts our controller without limit.
                "failure_config": {"max_failures": settings.failures.crash_streak, "controller_failure_limit": -1},
                "checkpoint_config": {
                    "num_to_keep": settings.checkpoint.keep_last, "checkpoint_score_order": "max",
                },
            },
        },
    }  # fmt: skip


def view(state: RunState, actor_of: Callable[[int], str], now: float, error: str | None = None) -> dict[str, Any]:
    """The run at wall clock time `now`: what changes of Ray's `TrainRun`, the running generation as a
    `TrainRunAttempt` (None: none runs), and under "ended" what became of the one before it."""
    status, detail = _run_status(state)
    if error is not None:
        detail = f"{detail}\n{error}"
    return {
        "time": now,
        "run": {
            "status": status, "status_detail": detail, "start_time_ns": int(state.started_at * _NS),
            "end_time_ns": int(now * _NS) if status in _OVER else None,
        },
        "attempt": _attempt(state, actor_of),
        "ended": _ended(state),
    }  # fmt: skip


def _run_status(state: RunState) -> tuple[str, str | None]:
    incident = state.trouble.incident
    returning = "RESIZING" if incident is not None and incident.planned else "RESTARTING"
    match state.phase:
        case Finished() as phase:
            return _ENDS.get(phase.status, "ERRORED"), phase.reason
        case Waiting() as phase:
            return returning if incident is not None else "SCHEDULING", state.fleet.shortage or phase.reason
        case Joining():
            return (returning, incident.evidence) if incident is not None else ("INITIALIZING", None)
        case Ending() as phase:
            return "RESTARTING", phase.evidence
        case _:
            return "RUNNING", None


def _attempt(state: RunState, actor_of: Callable[[int], str]) -> dict[str, Any] | None:
    phase = state.phase
    if isinstance(phase, Waiting | Finished):
        return None
    status = "PENDING" if isinstance(phase, Joining) else "ERRORED" if isinstance(phase, Ending) else "RUNNING"
    resources = {"resources": dict(state.settings.resources_per_worker)}
    return {
        "run_id": state.settings.run_id, "attempt_id": f"generation-{state.generation}", "status": status,
        "status_detail": phase.evidence if isinstance(phase, Ending) else None,
        "resources": [resources] * state.world_size, "workers": _workers(state, actor_of, resources),
    }  # fmt: skip


def _workers(state: RunState, actor_of: Callable[[int], str], resources: Mapping[str, Any]) -> list[dict[str, Any]]:
    found, on_node, settings = [], dict[str, int](), state.settings
    root = local_root(settings.storage_url)
    for rank, number in enumerate(state.members):
        worker, node = state.fleet.workers.get(number), state.fleet.node_of(number)
        if worker is None or node is None:
            continue
        local = on_node[node] = on_node.get(node, -1) + 1
        found.append({
            "world_rank": rank, "local_rank": local, "node_rank": list(on_node).index(node),
            "actor_id": actor_of(number), "node_id": node, "node_ip": worker.host, "pid": worker.pid or 0,
            # Ray tells the page which devices a process uses.
            "gpu_ids": [], "status": "ALIVE", "resources": resources,
            "log_file_path": f"{root}/{log_name(settings.run_id, number)}" if root is not None else None,
        })  # fmt: skip
    return found


def _ended(state: RunState) -> tuple[str, str | None]:
    """How a generation that does not run any more has ended, and why."""
    if isinstance(state.phase, Finished):
        return _run_status(state)
    incident = state.trouble.incident
    if incident is None:
        return "FINISHED", None
    return "FINISHED" if incident.planned else "ERRORED", incident.evidence


def merge(
    known: Mapping[str, Mapping[str, Any]], seen: Mapping[str, Any]
) -> tuple[dict[str, Mapping[str, Any]], list[Mapping[str, Any]]]:
    """The attempts by id after a view, oldest first, and those of them that have changed. `known` are the ones before:
    of a generation that ended between two views the later one tells the end."""
    now_ns, attempt, (ended, why) = int(seen["time"] * _NS), seen["attempt"], seen["ended"]
    running = attempt["attempt_id"] if attempt is not None else None
    after = dict(known)
    for name, old in known.items():
        if name != running and old["status"] not in _OVER:
            after[name] = _closed(old, ended, why, now_ns)
    if attempt is not None:
        old = known.get(attempt["attempt_id"]) or {"start_time_ns": now_ns, "workers": ()}
        # The generation as it began: a lost worker has left our books by now.
        entry = {**attempt, "start_time_ns": old["start_time_ns"], "workers": old["workers"] or attempt["workers"]}
        if entry["status"] in _OVER:
            entry = _closed(entry, entry["status"], entry["status_detail"], now_ns)
        after[entry["attempt_id"]] = entry
    changed = [entry for name, entry in after.items() if entry is not known.get(name)]
    for name in list(after)[:-_WHOLE]:
        changed.append({**after.pop(name), "workers": [], "resources": []})
    return after, changed


def _closed(attempt: Mapping[str, Any], status: str, why: str | None, now_ns: int) -> dict[str, Any]:
    workers = [{**worker, "status": "DEAD"} for worker in attempt["workers"]]
    return {**attempt, "status": status, "status_detail": why, "end_time_ns": now_ns, "workers": workers}


# --- Ray's private API ---


class StateActorSink:
    """Tells Ray Train's state actor, which is created where it is missing and stays, as it does after Ray Train's own
    runs. While it does not answer, views wait; anything else that is wrong with this API closes the sink."""

    def __init__(self, run: Mapping[str, Any]) -> None:
        self._run = run
        self._views: deque[Record] = deque(maxlen=_WAITING)
        self._known: dict[str, Mapping[str, Any]] = {}
        self._actor: Any = None
        self._silent = False

    def open(self, run: RunInfo) -> None:
        # A second of imports, for those who want the page.
        from ray.train.v2._internal.state import schema, state_actor

        self._schema: Any = schema
        self._find: Callable[[], Any] = state_actor.get_or_create_state_actor

    def write(self, record: Record) -> None:
        self._views.append(record)
        self._tell()

    def close(self) -> None:
        if self._views:
            self._tell()

    def _tell(self) -> None:
        try:
            if self._actor is None:
                self._join()
            while self._views:
                self._known = self._send(self._views[0])
                self._views.popleft()
            self._silent = False
        except (ray.exceptions.RayError, futures.TimeoutError) as error:
            if not self._silent:
                what = str(error) or type(error).__name__
                logger.warning("Ray's Train page is behind, and the run continues; its actor says: %s", what)
            self._silent, self._actor = True, None

    def _join(self) -> None:
        """A controller that was restarted, and a run that is resumed, continue with what is there; an actor that was
        restarted has lost it."""
        self._actor = self._find()
        told = _answer(self._actor.get_train_run_attempts.remote()).get(self._run["id"], {})
        for name, attempt in self._known.items():
            if name not in told:
                self._put(attempt)
        there = {name: attempt.model_dump(mode="json") for name, attempt in list(told.items())[-_WHOLE:]}
        self._known = {**there, **self._known}

    def _put(self, attempt: Mapping[str, Any]) -> None:
        _answer(self._actor.create_or_update_train_run_attempt.remote(self._schema.TrainRunAttempt(**attempt)))

    def _send(self, seen: Record) -> dict[str, Mapping[str, Any]]:
        known, changed = merge(self._known, seen)
        for attempt in changed:
            self._put(attempt)
        _answer(self._actor.create_or_update_train_run.remote(self._schema.TrainRun(**self._run, **seen["run"])))
        return known


def _answer(call: Any) -> Any:
    # `ray.get` warns in an asyncio actor, whatever thread calls it.
    return call.future().result(_ANSWER_LIMIT_S)
