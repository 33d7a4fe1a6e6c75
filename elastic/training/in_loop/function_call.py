"""The user's function, called once for as many generations as it can stay in its loop for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from elastic.core.checkpoint.snapshots import is_snapshot, parse_snapshot_id
from elastic.core.errors import CollectiveFailed, GenerationEnded, UsageError
from elastic.core.generation_spec import GenerationSpec
from elastic.core.names import parse_checkpoint_id
from elastic.training import cleanup, context
from elastic.training.in_loop.ahead import Ahead, until_needed
from elastic.training.in_loop.assembly import Given, Handles, assemble
from elastic.training.in_loop.own_collectives import OwnCollectives
from elastic.training.in_loop.set_up import SetUp
from elastic.training.in_loop.step_share import Unfinished
from elastic.training.in_loop.unfinished import fingerprint
from elastic.training.loop import GenerationRunner, call, seed_build
from elastic.training.result import SURVIVED, GenerationResult
from elastic.training.user.comparison import fingerprints
from elastic.training.user.rates import are_apart
from elastic.training.user.state import State

logger = logging.getLogger(__name__)

_ELSEWHERE = "it was not asking for its next batch: an evaluation, say"
# What leaves the others in their loop: a worker that joins begins with an epoch, and not after it.
_AFTER = "; after an epoch's steps, and not before them, it is done by all"
_BY_EPOCHS = "; with `for epoch in elastic.epochs(n)` it begins at the run's epoch, and the others stay"
_IN_ITS_OWN = "a collective of its own has failed in a step, outside of `with elastic.step():`"

# Set-up that takes longer, and is done a second time by the same process, is named.
_SLOW_S = 1.0

# For what they log. What they do on rank 0 they do in an engine, which is made anew.
_ASK_EACH_TIME = frozenset({"torch", "deepspeed"})

# Reports that the rank has left a generation and waits for the next one, on the training thread.
Next = Callable[[GenerationRunner, GenerationResult], GenerationRunner]


class FunctionCall:
    """Implements `elastic.training.session.InLoop`. `run` on the training thread, any number of times.

    Where the function cannot stay, it is left, and called again for the next generation; `on_left` is given the reason.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        config: Mapping[str, Any] | None,
        next_runner: Next,
        on_left: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._fn = fn
        self._config = config
        self._next_runner = next_runner
        self._on_left = on_left
        self._runner: GenerationRunner | None = None
        self._given: Given | None = None
        self._handles: Handles | None = None
        # The outcome of the current generation, where it is known before the loop comes back.
        self._abandoned: GenerationResult | None = None
        # What this rank has computed of the step in which the generation ended; `_asked` when it was taken.
        self._held: Unfinished | None = None
        self._asked = False
        # The generation was left inside of the function, which must be left too: its outcome, or what follows it.
        self._unclean: GenerationResult | None = None
        self._following: GenerationRunner | None = None
        # It is joined already: the function was left when its set-up was to be done by all together.
        self._joined = False
        # Why the function is left, and where its code was that may have stayed.
        self._reason: str | None = None
        self._elsewhere: str | None = None
        self._stays = True
        # How many collectives there were when the user's code outside of the steps began.
        self._collectives: int | None = None
        # The user's code sets learning rates that differ between ranks, or from those of a step that is repeated.
        self._rates_apart = False
        self._set_up = SetUp()
        self._own = OwnCollectives()
        # The run's steps up to where its loop has been; others have made more while it stood by.
        self._made, self._behind = 0, False
        self._calls, self._called_at = 0, 0.0

    def run(self, begins: GenerationRunner | Ahead) -> tuple[GenerationRunner, GenerationResult]:
        """Call the function for a generation, or ahead of its process's first. Returns the last generation that it ran
        in, which is left, and how that one ended."""
        while True:
            joined, self._joined = self._joined, False
            self._runner, self._following, self._unclean = None, None, None
            self._abandoned, self._reason, self._elsewhere = None, None, None
            self._rates_apart = False
            result = self._called_ahead(begins) if isinstance(begins, Ahead) else self._called(begins, joined)
            if self._runner is None:
                assert isinstance(begins, Ahead)
                begins = self._following or begins.first(None)
                continue
            survived = result.kind in SURVIVED and not self._current.generation.scope.last
            if self._handles is not None and self._reason is None and survived:
                self._leave_function(self._obstacle() or self._elsewhere or _ELSEWHERE)
            if self._given is not None:
                self._given.source.processes.close()
            # What they hold is the engine's.
            self._given = self._handles = self._held = None
            self._asked = False
            self._set_up.left()
            if self._following is not None:
                context.uninstall(self._current.generation)
                cleanup.collect(None)
                begins = self._following
                continue
            if self._unclean is not None:
                self._current.left_behind()
                return self._current, self._unclean
            self._current.announce(result)
            self._current.leave(result)
            return self._current, result

    def _called(self, runner: GenerationRunner, joined: bool) -> GenerationResult:
        try:
            self._runner = runner
            context.install(runner.generation)
            if joined:
                seed_build(runner.spec.seed)
            else:
                runner.join(self)
            self._set_up.begins()
            if not joined:
                self._set_up.joined(runner.generation.group, called=True, own=self._own)
            self.on_its_own()
            self._call()
            return self._returned()
        except BaseException as error:  # noqa: BLE001 - the shell's edge: everything becomes a result
            return self._classified(error)

    def _called_ahead(self, ahead: Ahead) -> GenerationResult:
        """Without a generation still, the function is to be called in one: it raised what it may not raise there."""
        seed_build(ahead.seed)
        self._set_up.begins()
        try:
            with until_needed(ahead, lambda given, told: self._enter(ahead.awaited(given), told)):
                self._call()
                # It may have needed none.
                context.current()
            return self._returned()
        except BaseException as error:  # noqa: BLE001 - the shell's edge: everything becomes a result
            if self._runner is not None:
                return self._classified(error)
            text = f"{type(error).__name__}: {error}"
            logger.warning("the training function is called again, in a generation; ahead of it, it raised %s", text)
            cleanup.forget(error)
            return GenerationResult("user_error", 0, message=text)

    def _call(self) -> None:
        self._calls, self._called_at = self._calls + 1, time.monotonic()
        self._own = OwnCollectives(self._own)
        try:
            call(self._fn, self._config, lambda: self._runner is not None and self._runner.finished)
        finally:
            self._set_up.closed()

    def _returned(self) -> GenerationResult:
        result = self._current.returned()
        if self._current.generation.engine is None:
            raise UsageError(
                "the training function has returned without elastic.initialize: no step was counted and nothing saved; "
                "train with the engine and the loader that elastic.initialize returns, not with the model and an "
                "optimizer of its own (transformers: `from elastic.integrations.transformers import Trainer`)"
            )
        return result

    def _classified(self, error: BaseException) -> GenerationResult:
        self._batch_broken()
        trains = self._given is not None and self._given.model.training
        if trains and self._current.generation.scope.of_script_in_batch():
            self._elsewhere = _IN_ITS_OWN
        result = self._current.classify(error)
        if self._abandoned is not None and isinstance(error, Exception):
            # What it makes of outputs that do not count is no failure of the run's; its device may be.
            self._elsewhere = (
                f"its code raised {type(error).__name__} ({error}) in a step that was abandoned, of which nothing is "
                "computed within `with elastic.step():`"
            )
            result = result if result.kind == "device_failed" else self._abandoned
        cleanup.forget(error)
        return result

    def _enter(self, runner: GenerationRunner, told: tuple[int, int] | None) -> None:
        """Install and join the generation that the function waits for, where it was `told` what is so. One that ends
        meanwhile is left for the next: the function has not seen it."""
        self._set_up.closed()
        while True:
            self._require_as_told(runner, told)
            self._runner = runner
            context.install(runner.generation)
            try:
                runner.join(self, begins=False)
                together = self._set_up.joined(runner.generation.group, called=True, own=self._own)
            except (Exception, GenerationEnded) as error:
                result = runner.classify(error)
                if result.kind not in SURVIVED or runner.generation.scope.last:
                    raise
                cleanup.forget(error)
            else:
                if together:
                    raise self._called_together(runner, together)
                self._set_up.reopened()
                self.on_its_own()
                return
            runner.announce(result)
            self._set_up.left()
            runner.leave(result)
            if not runner.clean:
                self._unclean = result
                raise self._leave_function("the generation was not left cleanly")
            runner = self._next_runner(runner, result)

    def _called_together(self, runner: GenerationRunner, why: str) -> GenerationEnded:
        """In the generation that is joined: its set-up is one of all ranks."""
        self._following, self._joined = runner, True
        runner.generation.state = State()
        return self._leave_function(why)

    def _require_as_told(self, runner: GenerationRunner, told: tuple[int, int] | None) -> None:
        """Another rank is no other than one that it keeps from here on; rank 0, another share of the model, and the
        world size, are."""
        spec = runner.spec
        if told is None or (spec.rank != 0 and spec.world_size == told[1] and spec.mesh.same_share(spec.rank, told[0])):
            return
        why = f"it was told that it would be rank {told[0]} of {told[1]}, and is rank {spec.rank} of {spec.world_size}"
        self._following = runner
        self._on_left(why)
        raise GenerationEnded(spec.generation, f"the training function is called again: {why}")

    # -- InLoop --------------------------------------------------------------------------------------------------------

    @property
    def called_again(self) -> bool:
        return self._calls > 1

    def rank_asked(self) -> None:
        self._set_up.rank_asked()

    def engines_own(self) -> AbstractContextManager[None]:
        return self._set_up.engines_own()

    def step_asked(self) -> None:
        self._own.by_step = True

    def batch_over(self, own: int, last: bool) -> None:
        if self._handles is not None and self._handles.engine.shown_ends.hidden:
            # The loop may have left out collectives that it makes at the end of other steps.
            self._own.goes_on()
        elif self._handles is None or self._is_scripts_own(self._handles):
            self._own.batch_over(own, last)
        if last:
            self._made = max(self._made, self._current.generation.scope.step)

    def initializing(self) -> None:
        self._set_up.closed()
        self._judge("its set-up")
        seconds = time.monotonic() - self._called_at
        if self._calls > 1 and seconds > _SLOW_S:
            self._on_left(f"its set-up has taken {seconds:.1f} s again; elastic.keep(...) keeps what it makes")

    def keep(self, given: Given, handles: Handles) -> None:
        self._given, self._handles = given, handles
        given.source.processes.stay()
        self._set_up.reopened()
        self.on_its_own()

    def on_its_own(self) -> None:
        self._collectives = self._begun_by_script()

    def comes_back(self) -> None:
        was_set_up = self._set_up.is_open
        self._set_up.closed()
        if was_set_up:
            self._judge("its code before the first batch")
        else:
            by_epochs = self._handles is not None and self._handles.loader.ended_by_epochs
            self._judge("its code between two iterations", _AFTER if by_epochs else _BY_EPOCHS)
        # A function that begins now begins where the run is.
        self._made = max(self._made, self._current.generation.scope.step)
        if was_set_up:
            self._tell_recording()

    def abandon(self, error: BaseException) -> bool:
        runner = self._current
        if self._abandoned is not None:
            return True
        result = runner.classify(error)
        self._look_for_rates(error)
        if result.kind not in SURVIVED or self._obstacle() is not None:
            return False
        # The first cause must reach the controller before the consequences that other ranks see.
        runner.announce(result)
        runner.generation.scope.fail(error)
        if result.kind != "anomaly" and not runner.generation.scope.planned:
            # What follows of the step may have collectives of the script's. After an anomaly all ranks are at the same.
            runner.generation.group.sever()
        self._abandoned = result
        # Now: what follows of the step is the user's code, which may clear gradients.
        self._hold(result)
        cleanup.forget(error)
        return True

    def recover(self, error: BaseException) -> None:
        while True:
            runner, result = self._current, self._abandoned or self._current.classify(error)
            if result.kind not in SURVIVED or runner.generation.scope.last:
                raise error
            self._look_for_rates(error)
            why = self._obstacle()
            if why is not None:
                self._leave_function(why)
                raise error
            self._abandoned = None
            cleanup.forget(error)
            runner.announce(result)
            self._hold(result)
            self._batch_broken()
            self._set_up.left()
            runner.leave(result, stays=True)
            if not runner.clean:
                self._unclean = result
                raise self._leave_function("the generation was not left cleanly")
            self._remember_weights()
            runner = self._next(runner, result)
            try:
                together = self._continue(runner)
            except Exception as failed:  # noqa: BLE001 - classified above, in the generation where it was raised
                error = failed
            except GenerationEnded as ended:
                error = ended
            else:
                if together:
                    raise self._called_together(runner, together)
                self._tell_recording()
                return

    # -- inside --------------------------------------------------------------------------------------------------------

    @property
    def _current(self) -> GenerationRunner:
        assert self._runner is not None
        return self._runner

    def _judge(self, code: str, instead: str = "") -> None:
        """A worker that joins runs this code while the others wait in their loop: nobody would answer there."""
        before, self._collectives = self._collectives, None
        if before is not None and self._begun_by_script() > before:
            why = f" ({self._set_up.recording.why})" if self._set_up.recording.why else ""
            what = f"{code} takes part in collectives, which a worker that joins does with all others{why}"
            self._own.outside = what + instead

    def _begun_by_script(self) -> int:
        """Collectives of this rank; without those whose results are kept for whoever joins."""
        return self._current.generation.group.collectives() - self._set_up.recorded

    @staticmethod
    def _is_scripts_own(handles: Handles) -> bool:
        """transformers' Trainer is a loop of the platform's."""
        return "transformers" not in handles.engine.followers

    def _batch_broken(self) -> None:
        if self._handles is not None and self._is_scripts_own(self._handles):
            self._own.broken(self._current.generation.scope.of_script_in_batch())

    def _tell_recording(self) -> None:
        """To workers that join; again with each generation, for a controller that was restarted."""
        scope, recording = self._current.generation.scope, self._set_up.recording
        if scope.spec.rank == 0 and (recording.made or self._own.outside):
            scope.coordinator.recorded(b"" if self._own.outside else recording.packed())

    def _look_for_rates(self, error: BaseException) -> None:
        self._rates_apart = self._rates_apart or are_apart(error)

    def _obstacle(self) -> str | None:
        """Why the function cannot stay; None where it can."""
        if self._handles is None:
            return "its elastic.initialize had not returned"
        if not self._stays:
            return "the engine could not be built again on the same model"
        if self._rates_apart:
            return (
                "it sets learning rates from a counter of its own, which is ahead of the run or differs between ranks; "
                "one by elastic.get_context().step stays right"
            )
        if self._current.generation.group.has_groups_of_script:
            return "it has made or taken process groups, which end with their generation"
        return self._handles.engine.obstacle()

    def _leave_function(self, why: str) -> GenerationEnded:
        self._reason = why
        logger.warning("the training function is left and called again: %s", why)
        self._on_left(why)
        spec = self._current.spec
        return GenerationEnded(spec.generation, f"the training function is called again: {why}")

    def _next(self, runner: GenerationRunner, result: GenerationResult) -> GenerationRunner:
        """Wait for the next generation. Raises GenerationEnded where the function must be called again for it."""
        following = self._next_runner(runner, result)
        if why := self._obstacle_to(following, runner.spec):
            self._following = following
            raise self._leave_function(why)
        # The object stays, and with it what was registered in it; the values are those that are restored.
        following.generation.state = runner.generation.state
        for key in list(following.generation.state):
            del following.generation.state[key]
        context.replace(runner.generation, following.generation)
        following.generation.state.adopt_objects(runner.generation.state)
        self._runner = following
        return following

    def _obstacle_to(self, following: GenerationRunner, before: GenerationSpec) -> str | None:
        """Why the function cannot stay in its loop for this generation; None where it can."""
        now = following.spec
        if now.checkpoint is None:
            return "there is no state to continue from: the run begins at its first step"
        if now.tp != before.tp and not following.generation.kind.cuts_again:
            return (
                f"{now.tp} workers share each layer from here on, not {before.tp}, and {now.engine} cannot cut a model "
                "that is in use"
            )
        assert self._handles is not None
        known = sorted(self._set_up.rank_known_to - self._handles.engine.followers - _ASK_EACH_TIME)
        if known and now.rank == 0 != before.rank:
            return (
                f"it is rank 0 from here on and has asked for its rank before its first batch (in {', '.join(known)}); "
                "one that asks elastic.get_context() in its loop stays"
            )
        step, loader = _step_of(now.checkpoint), self._handles.loader
        self._behind = step > self._made
        if loader.is_beyond(step):
            return "the run goes back over the end of an epoch, after which its code has run"
        if self._behind and loader.is_behind(step):
            return "it has stood by while the others came to the end of an epoch"
        return None

    def _hold(self, result: GenerationResult) -> None:
        """Once for every engine; what is held from an earlier one stays until an engine has it."""
        if not self._asked and self._handles is not None and result.kind in ("ended", "collective_failed"):
            self._asked = True
            taken = self._handles.engine.unfinished()
            if taken is not None and not taken.why:
                self._remember_user(taken)
            self._held = taken or self._held

    def _remember_user(self, taken: Unfinished) -> None:
        """What the loop has made of its state with whole micro-batches; it may go on to change it after an abandoned
        one, as averages are at the end of a step."""
        try:
            taken.user = fingerprints(self._current.generation.state)
        except Exception as error:  # noqa: BLE001 - to do the step again is right whatever it was
            taken.why = f"elastic.state could not be read ({type(error).__name__}: {error})"

    def _remember_weights(self) -> None:
        """After the generation was aborted and left: reading them waits for the device."""
        held = self._held
        if held is not None and not held.why and not held.weights:
            held.weights = fingerprint(held.module)

    def _continue(self, runner: GenerationRunner) -> str:
        """Join the generation and build its engine underneath the handles. Returns why the function is to be called
        again instead, by all together; empty where it is not."""
        assert self._given is not None
        assert self._handles is not None
        runner.join(self)
        self._own.goes_on()
        ends = self._handles.engine.shown_ends
        together = self._set_up.joined(
            runner.generation.group, called=False, own=self._own, behind=self._behind, shown=ends.last
        )
        if together:
            return together
        # A loop from which the end is hidden would not come to a collective at which another one waits.
        ends.again = ends.collectives and not self._set_up.alike
        try:
            assemble(runner.generation, self._given, self._handles, self._held)
            self._held, self._asked = None, False
            return ""
        except Exception as error:
            if runner.classify(error).kind in SURVIVED:
                raise
            # The user's code has not changed: what it gave was good enough for the generations before.
            self._stays = False
            where = runner.generation.scope.where()
            raise CollectiveFailed(
                f"the engine could not be built again on the same model ({type(error).__name__}: {error}); the "
                "training function is called again",
                where,
            ) from error


def _step_of(checkpoint: str) -> int:
    """The finished steps of a checkpoint, or of a snapshot in memory, by its id."""
    return parse_snapshot_id(checkpoint)[0] if is_snapshot(checkpoint) else parse_checkpoint_id(checkpoint).step
