"""What `Accelerator.prepare` gives back: as accelerate's own objects, with the run's engine and loader behind them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, RandomSampler

from elastic.core.errors import UsageError
from elastic.integrations.accelerate_ends import PREPARED, Ends, steps_made
from elastic.integrations.accelerate_passes import NextPass
from elastic.integrations.transformers_weights import everywhere
from elastic.training import context
from elastic.training.data.loader import ElasticLoader
from elastic.training.engine import ElasticEngine
from elastic.training.in_loop.stand_in import StandIn
from elastic.training.watch.once import warn_once

_TOGETHER = (
    "one model is trained, with one optimizer and one DataLoader: give them to accelerator.prepare(), in one call or "
    "in several; models that are not trained have no parameter with requires_grad"
)

_DRAWN = (
    ". What a {} gives is in no DataLoader: prepare the DataLoader, and draw from what that gives back, as by "
    "cycle(accelerator.prepare(loader))"
)

# Planned are steps of one batch of each worker.
_COUNTS_BATCHES = (
    "there are fewer workers than max_workers, and each has several batches in a step: optimizer.step() makes the "
    "update with the last of them. The script has not asked for accelerator.sync_gradients, under which belongs what "
    "it counts, logs or ends by for each update"
)

logger = logging.getLogger(__name__)


class Pieces:
    """What an engine is built of, as `prepare` has been given it."""

    def __init__(self) -> None:
        self.model: Any = None
        self.optimizer: Any = None
        self.loader: Any = None
        # The type of what is drawn from, and is no DataLoader.
        self.drawn: str | None = None

    @property
    def complete(self) -> bool:
        return not any(piece is None for piece in (self.model, self.optimizer, self.loader))

    def note(self, given: tuple[Any, ...]) -> None:
        """Raises UsageError for a second model that is trained, or optimizer."""
        self._note_one("model", [each for each in given if isinstance(each, torch.nn.Module) and _is_trained(each)])
        self._note_one("optimizer", [each for each in given if isinstance(each, torch.optim.Optimizer)])
        drawn = [type(each).__name__ for each in given if isinstance(each, Iterator)]
        self.drawn = next(iter(drawn), self.drawn)
        loaders = [each for each in given if isinstance(each, DataLoader)]
        if self.loader is None and loaders:
            shuffled = [each for each in loaders if _shuffles(each)]
            self.loader = next(iter(shuffled), loaders[0] if self.model is not None else None)

    def refusal(self) -> UsageError:
        """Of what has been given, where more or less was needed."""
        instead = "" if self.drawn is None or self.loader is not None else _DRAWN.format(self.drawn)
        return UsageError(f"elastic.integrations.accelerate: {_TOGETHER}{instead}")

    def _note_one(self, name: str, found: list[Any]) -> None:
        if len(found) > 1 or (found and getattr(self, name) is not None):
            raise self.refusal()
        if found:
            setattr(self, name, found[0])


def _is_trained(model: torch.nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())


def _shuffles(loader: DataLoader[Any]) -> bool:
    return isinstance(getattr(loader.batch_sampler, "sampler", None), RandomSampler)


class Updates:
    """The updates that a script's calls ask for: 1. `begin`, when there is an engine 2. for each batch `begin_batch`,
    maybe `clip`, `make`, and `end_batch`."""

    def __init__(self, gradient_state: Any) -> None:
        self.pieces = Pieces()
        self._gradient_state = gradient_state
        self._engine: ElasticEngine | None = None
        self._batches: ElasticLoader | None = None
        # What the job clips to; has the script asked for it in an update?
        self._clipping: float | None = None
        self._clips = False
        # What the model gives is converted to fp32, as by accelerate.
        self.in_16_bits = False
        # Workers with samples of their own, where the run has all that it may have.
        self.planned = 1
        # Batches that this function has been given, up to now.
        self.given = 0
        # Is a batch at hand? How many steps schedulers of the script's own have made in this step, before its end.
        self._at_hand, self._early = False, 0
        # Of the batch at hand: the update was made where it was to be clipped; it was asked for; it was not applied.
        self._clipped = self._asked = self._backward = False
        self.skipped = False
        # Was the script shown that the batch at hand ends a step, after its update? Is the batch dealt with?
        self._shown, self._noted = False, True
        # Has the script ever asked whether a batch ends a step?
        self._asks_ends = False
        self._ends = Ends()
        # Are weights on several workers? What follows a loop then.
        self._apart = False
        self._next_pass: NextPass | None = None

    def begin(self, engine: ElasticEngine, batches: ElasticLoader, planned: int, clipping: float | None) -> None:
        """`clipping` is what the job itself says."""
        self._engine, self._batches, self.planned, self._clipping = engine, batches, planned, clipping

    @property
    def begun(self) -> bool:
        return self._engine is not None

    @property
    def engine(self) -> ElasticEngine:
        if self._engine is None:
            raise self.pieces.refusal()
        return self._engine

    @property
    def batches(self) -> ElasticLoader:
        if self._batches is None:
            raise self.pieces.refusal()
        return self._batches

    @property
    def abandoned(self) -> bool:
        return self._engine is not None and self._engine.abandoned

    def trains(self, model: Any) -> bool:
        return self.begun and (type(model) is PreparedModel or model is self.engine or model is self.engine.module)

    def begin_batch(self) -> None:
        """Raises UsageError where the batch before has made an update that the script has not asked for."""
        if self._clipped and not self._asked and not self.skipped:
            raise UsageError(
                "accelerator.clip_grad_norm_ was called and optimizer.step() was not, in a batch that ends a step: the "
                "update is made with the clipping; leave out the clipping where the update is left out"
            )
        if not self.given:
            self._follow_schedulers()
        if self._gradient_state.sync_gradients or self.skipped:
            self._early = 0
        self.given += 1
        self._forget_pass()
        self._apart = not everywhere(self.engine)
        self._clipped = self._asked = self._backward = self._shown = self._noted = False
        self._at_hand = True
        self._gradient_state._set_sync_gradients(self.engine.is_gradient_accumulation_boundary())
        self._ends.begin(self.engine)

    @property
    def ends_step(self) -> bool:
        """Does the step end with the batch at hand? Not where it is abandoned: it is made with later ones."""
        return bool(self._gradient_state.sync_gradients and not self.abandoned)

    def shows_end(self) -> bool:
        """The same for the script, from which the ends of repeated steps are hidden: it has counted them already."""
        self._asks_ends = True
        if not self.ends_step or self._hidden:
            return False
        self._shown = self._asked
        if self._at_hand:
            self._ends.shown()
        return True

    @property
    def _hidden(self) -> bool:
        return self._engine is not None and self._engine.shown_ends.hidden

    def end_batch(self) -> None:
        """The script is done with it. Once for each batch. Raises UsageError for a step that ends without an update."""
        noted, self._noted = self._noted, True
        if noted:
            return
        if not self._gradient_state.sync_gradients:
            if self._backward and not self._asked:
                # Scripts may ask for an update only where a step ends.
                self._step()
            elif self._asked and not self._asks_ends and self._gradient_state.num_steps == 1:
                warn_once(logger, _COUNTS_BATCHES)
            return
        if not self._hidden:
            if self._backward and not (self._asked or self._clipped or self.abandoned):
                raise UsageError(
                    "a step ends with this batch, and optimizer.step() was not called: which batches end one depends "
                    "on the number of workers; call it with every batch, or where accelerator.sync_gradients is true"
                )
            if self._shown or not self.abandoned:
                self._ends.note(self.engine)
        elif not self.abandoned:
            if not self._asked:
                self.make()
            for scheduler in self._ends.left_out().elements():
                scheduler.step()

    def leave_loop(self) -> None:
        """Before collectives: a script that counts its steps may have left its loop, and be in it on a new worker."""
        self._forget_pass()
        if self._batches is not None:
            self._batches.leave_together()

    def end_batches(self, early: bool) -> None:
        """An iteration is over, `early` where the script has left it."""
        self._at_hand = False
        if self._engine is not None:
            self._engine.shown_ends.hidden = False
        if self._apart and early:
            self._next_pass = NextPass(self.pieces.model, self.leave_loop)

    def before_pass(self) -> None:
        """Of the prepared model; where that is compiled, hooks may not be called."""
        if self._next_pass is not None:
            self.leave_loop()

    def _forget_pass(self) -> None:
        if self._next_pass is not None:
            self._next_pass.forget()
            self._next_pass = None

    def scheduled(self, scheduler: Any) -> None:
        if self._at_hand and self._gradient_state.sync_gradients:
            self._ends.now.scheduled[scheduler] += 1

    def counts(self) -> bool:
        """Does a step count that a scheduler of the script's own makes now? With each batch such as many do as there
        are batches of a worker in a step with all the workers that the run is planned for: as many as without it."""
        if not self._at_hand:
            return bool(self.given or steps_made() == 0)
        if self.abandoned or self._gradient_state.sync_gradients:
            return not self.abandoned
        self._early += 1
        return self._early < int(self._gradient_state.num_steps)

    def _follow_schedulers(self) -> None:
        """Those that steer the optimizer and were not prepared: the loader has registered them."""
        generation = context.current()
        objects = {} if generation is None else generation.state.objects
        for name, target in objects.items():
            if isinstance(target, LRScheduler) and not name.startswith(PREPARED):
                follow(target, self.counts)

    def backward(self, loss: torch.Tensor) -> None:
        self._backward = True
        self.engine.backward(loss)

    def clip(self, largest: float, device: torch.device) -> torch.Tensor | None:
        if not self._gradient_state.sync_gradients:
            return None
        self._clip(largest)
        norm = 0.0 if self.engine.abandoned else self.engine.get_global_grad_norm()
        return None if norm is None else torch.tensor(norm, device=device)

    def _clip(self, largest: float) -> None:
        self._ends.now.clipped = largest
        if self._clipping is None:
            self._clips = True
            self.engine.clip(largest)
        elif self._clipping != largest:
            raise UsageError(
                f"accelerator.clip_grad_norm_(..., {largest}), and gradient_clipping in the job is {self._clipping}; "
                "leave it out of the job"
            )
        self._clipped = True
        self._step()

    def make(self) -> None:
        self._asked = True
        if self._hidden and self.ends_step and not self._clipped and (largest := self._ends.before.clipped) is not None:
            self._clip(largest)
        if self._clipped:
            return
        if self._clips and self._gradient_state.sync_gradients:
            # A step before this one was clipped.
            self._clips = False
            self.engine.clip(0.0)
        self._step()

    def _step(self) -> None:
        if self.engine.abandoned:
            self.skipped = True
            self.engine.step()
            return
        before = self.engine.skipped_steps
        self.engine.step()
        # fp16 that overflows is not applied.
        self.skipped = self.engine.abandoned or self.engine.skipped_steps > before


class PreparedModel(StandIn):
    """The script's model until there is an engine, then that."""

    def __init__(self, model: torch.nn.Module, updates: Updates) -> None:
        object.__setattr__(self, "_model", model)
        object.__setattr__(self, "_updates", updates)

    @property
    def _target(self) -> Any:
        updates = object.__getattribute__(self, "_updates")
        return updates.engine if updates.begun else object.__getattribute__(self, "_model")

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        from accelerate.utils import convert_to_fp32

        updates = object.__getattribute__(self, "_updates")
        updates.before_pass()
        output = self._target(*inputs, **kwargs)
        return convert_to_fp32(output) if updates.in_16_bits else output


class PreparedOptimizer(StandIn):
    """Every attribute is the script's optimizer's own, but for the step, which is the engine's."""

    def __init__(self, optimizer: torch.optim.Optimizer, updates: Updates) -> None:
        super().__init__(optimizer)
        object.__setattr__(self, "_updates", updates)

    def step(self, closure: Any = None) -> None:
        """After each batch; where the batch does not end a step nothing is updated. Raises UsageError for a closure."""
        if closure is not None:
            raise UsageError("optimizer.step(closure) is not supported: the step would be made again")
        object.__getattribute__(self, "_updates").make()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients are the engine's, which clears them after the update."""

    @property
    def step_was_skipped(self) -> bool:
        return bool(object.__getattribute__(self, "_updates").skipped)

    def __setattr__(self, name: str, value: Any) -> None:
        # torch's schedulers put a counter around `step`, of the optimizer that they are made with: that is this one.
        if name == "step":
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)


class PreparedLoader:
    """The run's loader. Batches are put on the device, and say whether they end a step; its length is that at the
    number of workers that the run is planned for."""

    def __init__(self, given: DataLoader[Any], updates: Updates, device: torch.device | None) -> None:
        self.dataset = given.dataset
        self._updates = updates
        self._device = device

    def __iter__(self) -> Iterator[Any]:
        from accelerate.utils import send_to_device

        # The loop may have been left after a batch.
        self._updates.end_batch()
        early = True
        try:
            for batch in self._updates.batches:
                self._updates.begin_batch()
                yield batch if self._device is None else send_to_device(batch, self._device)
                self._updates.end_batch()
            early = False
        finally:
            self._updates.end_batches(early)

    def __len__(self) -> int:
        return math.ceil(self.total_dataset_length / self.total_batch_size)

    @property
    def total_batch_size(self) -> int:
        return self._updates.batches.batch_size * self._updates.planned

    @property
    def total_dataset_length(self) -> int:
        size = self._updates.batches.plan.dataset_size
        if size is None:
            raise TypeError("a stream has no length")
        return size

    def set_epoch(self, epoch: int) -> None:
        """The run counts its epochs."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._updates.batches, name)


def follow(scheduler: Any, counts: Callable[[], bool]) -> None:
    """From here on it steps where `counts()`. By its class: what is in the object is in its state."""
    kind = type(scheduler)

    def step(self: Any, *args: Any, **kwargs: Any) -> None:
        if counts():
            kind.step(self, *args, **kwargs)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "step": step}
    scheduler.__class__ = type(kind.__name__, (kind,), names)


class PreparedScheduler:
    """Steps with the updates, as often as accelerate would: `times`, once for each process that the run is planned for,
    as the lengths that scripts give schedules count them. The script's own object is `scheduler`."""

    def __init__(self, scheduler: Any, accelerator: Any, times: int) -> None:
        self.scheduler = scheduler
        self._accelerator = accelerator
        self._times = times

    def step(self, *args: Any, **kwargs: Any) -> None:
        updates = self._accelerator.updates
        updates.scheduled(self)
        if updates.begun and not updates.given and steps_made() > 0:
            # After the epochs before the one that the run is in, which are empty: these are in its state.
            return
        if not self._accelerator.step_scheduler_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not updates.ends_step or updates.skipped:
            return
        for _ in range(self._times):
            # torch's OneCycleLR raises beyond its end.
            if self.scheduler._step_count <= getattr(self.scheduler, "total_steps", math.inf):
                self.scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)
