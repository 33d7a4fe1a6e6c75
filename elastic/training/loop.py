"""One generation of one worker: join, call the user's function, report how it ended, close everything."""

from __future__ import annotations

import inspect
import logging
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from elastic.comm.device_check import device_error
from elastic.comm.failures import as_collective_failure, is_of_device, is_of_hardware, peer_of
from elastic.core.errors import (
    CollectiveFailed,
    ElasticError,
    GenerationEnded,
    IntegrityError,
    MeshRefused,
    RunOver,
    StorageError,
    UsageError,
)
from elastic.core.generation_spec import GenerationSpec, Rendezvous
from elastic.engines.base import EngineKind
from elastic.training import cleanup, context, rng
from elastic.training.advice import NO_BATCH, advice
from elastic.training.generation import Generation
from elastic.training.result import GenerationResult, Kind
from elastic.training.saving import save_pretrained
from elastic.training.session import Coordinator, InLoop, Phase

logger = logging.getLogger(__name__)

# How often an abort is repeated: groups that are being built open new sockets.
_ABORT_EVERY_S = 0.05
# An error of the user's code ends the run, except where it is one rank's: the others are held up for so long.
_TOGETHER_S = 1.0
# How often groups are polled for failures that no call raises.
_ASK_EVERY_S = 0.1


class GenerationRunner:
    """`run` once, on the training thread; `abort` from any thread, before, during or after.

    `on_result` is called once, as soon as the outcome is known and before this rank closes its own groups, so that the
    first cause reaches the controller before the failures that the closing causes on other ranks; from another thread
    where no call raises a collective's failure. An exception in it is logged. After `run`, `clean` is False if the
    engine outlived its generation or the device is unusable: start a fresh process then.
    """

    def __init__(
        self,
        spec: GenerationSpec,
        coordinator: Coordinator,
        rendezvous: Rendezvous,
        on_result: Callable[[GenerationResult], None] | None = None,
        local_rank: int = 0,
        kind: EngineKind | None = None,
    ) -> None:
        self.spec = spec
        self.clean = True
        self.generation = Generation(spec, coordinator, rendezvous, local_rank, kind)
        self._device_works = True
        self._on_result = on_result
        self._scope = self.generation.scope
        self._group = self.generation.group
        self._left = threading.Event()
        self._abort_lock = threading.Lock()
        self._aborted = False
        self._announced = False

    def run(self, fn: Callable[..., Any], config: Mapping[str, Any] | None = None) -> GenerationResult:
        """Run `fn(config)`, or `fn()` if it has no parameters. Returns after everything is closed; never raises."""
        try:
            context.install(self.generation)
            self.join()
            call(fn, config, lambda: self.finished)
            result = self.returned()
        except BaseException as error:  # noqa: BLE001 - the shell's edge: everything becomes a result
            result = self.classify(error)
            cleanup.forget(error)
        self.announce(result)
        self.leave(result)
        return result

    def abort(self, reason: str) -> None:
        """End the generation now: a training thread that is blocked in a collective is released within milliseconds.

        Code that neither trains nor loads (a long computation of the user's) ends at its next call of the engine or
        the loader. Returns at once; calling it again does nothing new.
        """
        with self._abort_lock:
            first, self._aborted = not self._aborted, True
            self._scope.end(reason)
        self._group.abort()
        if first and not self._left.is_set():
            threading.Thread(target=self._keep_aborting, name="elastic-abort", daemon=True).start()

    @property
    def finished(self) -> bool:
        """Is the run's last step done and saved?"""
        steps = self.generation.steps
        return steps is not None and steps.finished

    @property
    def step(self) -> int:
        """Finished optimizer steps so far; any thread may ask."""
        return self._scope.step

    # -- the parts of `run`, for a function that stays in its loop: see `in_loop` --------------------------------------

    def join(self, in_loop: InLoop | None = None, begins: bool = True) -> None:
        """Form the process group, with this generation installed. Raises what forming it raises. `begins`: the user's
        function has not run before."""
        scope = self._scope
        scope.check()
        cleanup.warm_up(self.generation.kind)
        save_pretrained.gather_first()
        self.generation.in_loop = in_loop
        scope.enter(Phase.JOINING)
        self.generation.join()
        if self._group.fails_silently:
            threading.Thread(target=self._watch_group, name="elastic-group", daemon=True).start()
        scope.enter(Phase.BUILDING)
        if begins:
            seed_build(self.spec.seed)

    def returned(self) -> GenerationResult:
        """The user's function returned. `except BaseException` in it may have swallowed an end: check again."""
        steps, completed = self.generation.steps, self.finished
        if not completed:
            self._scope.check()
            loader = self.generation.loader
            if loader is not None and loader.never_came:
                raise UsageError(
                    f"the training function has returned after step {self.step} without a batch. {NO_BATCH}"
                )
            completed = steps is not None and steps.returned()
        if late := self.generation.take_metrics():
            logger.warning(
                "elastic.report(%s) came after the report of step %d, the last one, and is in none: where the loop is "
                "over elastic.epochs(), what is reported after an epoch is still of its last step",
                ", ".join(f"{name}=..." for name in sorted(late)), self.step,
            )  # fmt: skip
        return GenerationResult("finished", self._scope.step, completed, where=self._scope.where())

    def classify(self, error: BaseException) -> GenerationResult:
        """What `error`, raised in this generation, means."""
        scope = self._scope
        if is_of_device(error):
            self._device_works = False
        if scope.bad_step is not None:
            bad = scope.bad_step
            return self._result("anomaly", error, message=str(bad), text=None, bad_step=bad)
        if isinstance(error, GenerationEnded):
            return self._result("ended", error, message=error.reason, text=None)
        if scope.ended is not None:
            self._say_of_the_end(error)
            return self._result("ended", error, message=scope.ended)
        if isinstance(error, MeshRefused) and self.spec.any_tp:
            return self._result("mesh_refused", error)
        if isinstance(error, UsageError):
            return self._result("usage_error", error)
        failure = as_collective_failure(error, scope.where())
        if failure is not None:
            return self._collective_failed(failure)
        sentence = advice(error)
        if sentence is not None:
            return self._result("usage_error", error, message=sentence)
        if is_of_hardware(error):
            return self._result("device_failed", error)
        if scope.phase is Phase.RESTORING or isinstance(error, (IntegrityError, StorageError)):
            return self._result("restore_failed", error, checkpoint=self.spec.checkpoint)
        return self._result("user_error", error)

    def _say_of_the_end(self, error: BaseException) -> None:
        """The abort itself makes pending calls fail, and what the user's code makes of that is no failure of its own;
        but it may be one."""
        theirs = not isinstance(error, ElasticError) and as_collective_failure(error, self._scope.where()) is None
        logger.log(
            logging.WARNING if theirs else logging.DEBUG,
            "generation %d had ended (%s) when %s was raised: %s; if that is the script's own, it comes again",
            self.spec.generation, self._scope.ended, type(error).__name__, error,
        )  # fmt: skip

    def _collective_failed(self, failure: CollectiveFailed) -> GenerationResult:
        sick = device_error(self._scope.device)
        if sick is not None:
            # The collective failed because this rank's device did, by itself or under the user's kernel.
            self._device_works = False
            sick.__cause__ = failure
            return self._result("device_failed" if is_of_hardware(sick) else "user_error", sick)
        peer, rank = self._group.identify(peer_of(failure.message))
        return self._result("collective_failed", failure, peer=peer, peer_rank=rank)

    def _result(
        self, kind: Kind, error: BaseException, message: str | None = None, text: str | None = "", **more: Any
    ) -> GenerationResult:
        cause = error.__cause__ if isinstance(error, CollectiveFailed) and error.__cause__ else error
        return GenerationResult(
            kind,
            self._scope.step,
            error_type=f"{type(cause).__module__}.{type(cause).__qualname__}",
            message="; ".join([str(error), *getattr(error, "__notes__", ())]) if message is None else message,
            traceback=None if text is None else "".join(traceback.format_exception(cause)),
            where=self._scope.where(),
            **more,
        )

    def _watch_group(self) -> None:
        """Concurrently with the training thread, which may be blocked in a collective or wait for its device."""
        while not self._left.wait(_ASK_EVERY_S):
            try:
                error = self._group.error()
            except Exception:
                # Without this watch a collective that fails silently would be noticed as a hang only.
                logger.exception("generation %d: the groups cannot be asked for errors", self.spec.generation)
                error = None
            if self._announced or self._scope.ended is not None:
                # An abort makes groups report errors as well.
                return
            if error is not None:
                failure = CollectiveFailed(f"a collective failed: {error}", self._scope.where())
                self.announce(self._collective_failed(failure))
                self.abort(failure.message)
                return

    def announce(self, result: GenerationResult) -> None:
        """Once; later calls do nothing."""
        with self._abort_lock:
            first, self._announced = not self._announced, True
        if self._on_result is None or not first:
            return
        try:
            self._on_result(result)
        except Exception:
            logger.exception("generation %d: the outcome could not be reported", self.spec.generation)

    def leave(self, result: GenerationResult, stays: bool = False) -> None:
        """Close everything. `stays`: the user's function continues with the next generation, on the same model."""
        scope, generation = self._scope, self.generation
        if result.kind in ("user_error", "usage_error", "mesh_refused"):
            self._group.leave_together(_TOGETHER_S)
        if result.kind not in ("finished", "ended", "anomaly") or (result.kind == "ended" and not scope.planned):
            # Pending collectives of this rank would block the destruction of the groups. After a normal end nothing is
            # aborted: a slower rank may still be reading what this one has sent.
            self._group.abort()
            if device_error(scope.device) is not None:
                self._device_works = False
        try:
            scope.enter(Phase.LEAVING)
        except BaseException as error:  # noqa: BLE001 - the coordinator may refuse an ended generation
            logger.debug("the coordinator was not told of the end: %s", error)
        try:
            self.clean = generation.close(stays) and self._device_works
        except Exception:
            logger.exception("generation %d was not left cleanly", self.spec.generation)
            self.clean = False
        finally:
            if not stays:
                context.uninstall(generation)
            self._left.set()

    def left_behind(self) -> None:
        """The user's function, which was to stay after `leave`, has been left after all."""
        self.clean = self.generation.collect() and self._device_works
        context.uninstall(self.generation)

    def _keep_aborting(self) -> None:
        while not self._left.wait(_ABORT_EVERY_S):
            self._group.abort()


def seed_build(seed: int) -> None:
    """The user's function builds the model: equal weights on every rank and at every world size."""
    rng.seed_everything(seed, "build")


def call(fn: Callable[..., Any], config: Mapping[str, Any] | None, finished: Callable[[], bool]) -> None:
    """`fn(config)`, or `fn()`. Where the run is `finished`, a loop that has no end of its own is left."""
    takes_config = bool(inspect.signature(fn).parameters)
    try:
        if takes_config:
            fn(dict(config or {}))
        else:
            fn()
    except SystemExit as end:
        # `sys.exit(main())` at the end of a script.
        if end.code:
            raise
    except RunOver:
        pass
    except StopIteration:
        # Of `next()` on an iterator over the loader.
        if not finished():
            raise
        logger.warning(
            "the run is over and the training function asked for another batch by next(): it is left, and what stands "
            "after its loop does not run; `for batch in loader` ends by itself"
        )
