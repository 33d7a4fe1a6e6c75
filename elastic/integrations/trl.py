"""`GRPOTrainer` and `RLOOTrainer` of TRL, elastic: they train on what their model has made of each step's prompts.

    from elastic.integrations.trl import GRPOTrainer      # instead of: from trl import GRPOTrainer

Rewards, losses, reference model and arguments are TRL's own. A sample of the run is a prompt, whose completions are in
one micro-batch: they are sampled from a random stream of the step and the micro-batch, and so are the same at every
number of workers. Other Trainers of TRL need no class of their own (`elastic.integrations.transformers`).
"""

from __future__ import annotations

import itertools
import math
import os
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from elastic.core.data.micro_batches import MicroBatch
from elastic.core.errors import UsageError
from elastic.integrations.engine_config import spec_of_generation
from elastic.integrations.rollouts import Counts, Figures, alone, copied, counted_as, later, one_step
from elastic.integrations.transformers import Trainer
from elastic.integrations.transformers_state import number
from elastic.training import api, rng
from elastic.training.data.loader import ElasticLoader
from elastic.training.engine import ElasticEngine

try:
    import trl
except ImportError as error:
    raise UsageError("elastic.integrations.trl needs trl: install the extra `hf` of ray-elastic, and trl") from error

# Where the Trainer's own state is in api.state.
_KEPT = "trl.Trainer"
_BATCH = "all completions of a step would be compared at once, those of other workers too; leave it out"
_STATE = "what it changes from step to step is in no snapshot; leave it out"
_NOT_RUN = "it has not been run on the platform; leave it out"
# Argument -> (the value that asks for nothing, what to do instead).
_REFUSED: dict[str, tuple[Any, str]] = {
    "num_iterations": (1, "completions are made for one step, and no snapshot has them"),
    "use_vllm": (False, _NOT_RUN),
    "use_transformers_continuous_batching": (False, _NOT_RUN),
    "sync_ref_model": (False, _STATE),
    "use_adaptive_entropy": (False, _STATE),
    "normalize_advantages": (False, _BATCH),
    "multi_objective_aggregation": ("sum_then_normalize", _BATCH),
}


# At its place in the bases `Trainer` would come before a base of TRL's own, which it would hide.
if TYPE_CHECKING:
    _Before = Trainer
else:
    _Before = object


class _OnPolicy(_Before):
    """The first base, before TRL's Trainer and `Trainer`."""

    # Those of the platform: TRL's own deal prompts out by the number of processes.
    get_train_dataloader = Trainer.get_train_dataloader
    _get_train_sampler = Trainer._get_train_sampler
    _makes_completions = True
    num_generations: int
    num_generations_eval: int
    shuffle_dataset: bool
    log_completions: bool
    _metrics: dict[str, Figures]
    # What was logged of finished steps since the last line: of all ranks, on each.
    _before: Mapping[str, list[float]]
    # Of the step under way: completions by number, until they are trained on; the micro-batch whose are at hand; what
    # was logged of each micro-batch, by its index; and the tokens of all ranks.
    _made: list[Any]
    _at_hand: MicroBatch
    _figures: dict[int, Figures]
    _counts: Counts | None = None
    # Whether each next batch of the evaluation is one of its own.
    _evaluates: Iterator[bool]
    _loader: ElasticLoader

    def create_accelerator_and_postprocess(self) -> None:
        _refuse(self)
        self._figures = {}
        super().create_accelerator_and_postprocess()

    def _micro_batch_size(self) -> int:
        """In prompts."""
        return int(self.args.per_device_train_batch_size) // self.num_generations

    def _initialize(self) -> tuple[Any, Any]:
        engine, self._loader = super()._initialize()
        return engine, self._loader

    def _training_data(self) -> tuple[Any, Any]:
        dataset, collate = super()._training_data()
        return dataset, _Repeated(collate, self.num_generations)

    def _sequential(self) -> bool:
        return not self.shuffle_dataset

    # -- completions ---------------------------------------------------------------------------------------------------

    def _prepare_inputs(self, batch: Any) -> Any:
        """Completions of the prompts at hand, with their advantages; those of a whole step when it begins."""
        if not self.model.training:
            # By what they are: which rank evaluates them, and beside which others, changes with the number of ranks.
            prompts = zlib.crc32(repr([row.get("prompt") for row in batch]).encode())
            rng.seed_everything(spec_of_generation().seed, "evaluated completions", self.state.global_step, prompts)
            with alone():
                return self._generate_and_score_completions(batch)
        progress = self._loader.step_loop.progress
        assert progress is not None
        number = progress.next_batch - 1
        if number == 0:
            with api.busy("making completions"):
                batches = [(progress.batches[0], batch), *self._loader.coming()]
                self._made = self._completions(progress.step, batches, progress.kept)
            self._step, self.current_gradient_accumulation_steps = 0, len(self._made)
        self._at_hand = progress.batches[number]
        made, self._made[number] = self._made[number], None
        return made

    def _completions(
        self, step: int, batches: Sequence[tuple[MicroBatch, Any]], kept: Collection[MicroBatch]
    ) -> list[Any]:
        """Of the micro-batches that this rank has in the step; of those that are `kept` it has the gradients already.
        Collective."""
        self._metrics["train"] = copied(self._before)
        indices = {batch.index for batch in kept}
        self._figures = {index: figures for index, figures in self._figures.items() if index in indices}
        seen: int = self.state.num_input_tokens_seen
        made: list[Any] = []
        items = 0.0
        for batch, rows in batches:
            rng.seed_everything(spec_of_generation().seed, "completions", step, batch.index)
            with alone(), self._noting(batch):
                made.append(self._generate_and_score_completions(rows))
            items += float(made[-1].get("num_items_in_batch", 0)) if batch.weight > 0 else 0.0
        # As the loader has left it: engine and loop draw from here.
        rng.seed_everything(spec_of_generation().seed, "loop", step, batches[0][0].index)
        own = Counts(items, self.state.num_input_tokens_seen - seen)
        # Of a step that this rank has begun once, and others with it: what it had then is of all of it.
        self._counts = own.over_ranks(self._counts if kept else None, self.args.device)
        self.state.num_input_tokens_seen = seen + round(self._counts.all)
        for (batch, _), inputs in zip(batches, made, strict=True):
            if "num_items_in_batch" in inputs:
                # Losses by tokens divide by the step's, of which this is the micro-batch's share: the platform weights
                # its loss by its samples. TRL divides it by the steps of a generation.
                share = self._counts.items * batch.weight * self.args.steps_per_generation
                inputs["num_items_in_batch"] = torch.tensor(share, device=self.args.device)
        return made

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        engine = self.model_wrapped
        gathers = isinstance(engine, ElasticEngine) and self.args.ds3_gather_for_generation
        with engine.gathered() if gathers else nullcontext():
            return super()._generate_single_turn(*args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        passes, self.current_gradient_accumulation_steps = self.current_gradient_accumulation_steps, 1
        try:
            with alone(), self._noting(self._at_hand) if self.model.training else nullcontext():
                return super().compute_loss(model, inputs, *args, **kwargs)
        finally:
            self.current_gradient_accumulation_steps = passes

    # -- what is logged ------------------------------------------------------------------------------------------------

    @contextmanager
    def _noting(self, batch: MicroBatch) -> Iterator[None]:
        """What is logged meanwhile is of this micro-batch. A pass that fills up a step has no figures and no tokens."""
        counts = batch.weight > 0
        before, seen = self._metrics["train"], self.state.num_input_tokens_seen
        self._metrics["train"] = self._figures.setdefault(batch.index, copied({})) if counts else copied({})
        try:
            yield
        finally:
            self._metrics["train"] = before
            if not counts:
                self.state.num_input_tokens_seen = seen

    def _after(self, engine: Any, epoch: int, ignore_keys: list[str] | None) -> None:
        """What TRL logs beside the loss is that of all ranks, step by step, and goes on after a recovery."""
        of_step, own = self._metrics["train"], copied({})
        for figures in (*self._figures.values(), later(of_step, self._before)):
            for name, values in figures.items():
                own[name] += values
        self._figures = {}
        self._metrics["train"] = copied(self._before)
        for name, value in one_step(own).items():
            self._metrics["train"][name].append(value)
        self._metrics["train"]["num_tokens"] = [self.state.num_input_tokens_seen]
        super()._after(engine, epoch, ignore_keys)

    def _keep(self) -> None:
        super()._keep()
        self._before = dict(copied(self._metrics["train"]))
        figures = {name: [number(value) for value in values] for name, values in self._before.items()}
        api.state[_KEPT] = {"figures": figures, "tokens": self.state.num_input_tokens_seen}

    def _take_up(self) -> None:
        super()._take_up()
        kept = api.state.get(_KEPT, {})
        figures = kept.get("figures", {}).items()
        self._before = {name: [math.nan if each is None else each for each in values] for name, values in figures}
        self.state.num_input_tokens_seen = kept.get("tokens", 0)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Each completion counts once: at its end accelerate begins anew where ranks would have no batch."""
        world, batch = self.args.world_size, self.args.per_device_eval_batch_size
        with counted_as(dataloader.dataset, self.num_generations_eval) as rows:
            self._evaluates = (number * batch < rows for number in itertools.count(self.args.process_index, world))
            found = super().evaluation_loop(dataloader, *args, **kwargs)
        of_all = one_step(self._metrics["eval"]).items()
        self._metrics["eval"] = copied({name: [value] for name, value in of_all})
        return found

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        before = self._metrics["eval"]
        if not next(self._evaluates):
            self._metrics["eval"] = copied({})
        try:
            return super().prediction_step(*args, **kwargs)
        finally:
            self._metrics["eval"] = before

    def log(self, *args: Any, **kwargs: Any) -> None:
        if self.log_completions and self.is_world_process_zero():
            # Made by the constructor, on the rank that was the first then.
            os.makedirs(os.path.join(self.args.output_dir, "completions"), exist_ok=True)
        super().log(*args, **kwargs)


class GRPOTrainer(_OnPolicy, trl.GRPOTrainer, Trainer):  # type: ignore[misc]
    """That of TRL; see the module. Raises UsageError, by name, for arguments that an elastic run cannot honour."""


class RLOOTrainer(_OnPolicy, trl.RLOOTrainer, Trainer):  # type: ignore[misc]
    """That of TRL; see the module. Raises UsageError, by name, for arguments that an elastic run cannot honour."""


class _Repeated:
    """Collates prompts: each as often as it has completions."""

    def __init__(self, collate: Callable[[list[Any]], Any], times: int) -> None:
        self._collate, self._times = collate, times

    def __call__(self, rows: list[Any]) -> list[Any]:
        # TRL writes into rows.
        return [dict(row) for row in self._collate(rows) for _ in range(self._times)]


def _name(own: _OnPolicy) -> str:
    return (
        f"elastic.integrations.trl.{next(kind.__name__ for kind in type(own).__mro__ if kind.__module__ == __name__)}"
    )


def _refuse(own: _OnPolicy) -> None:
    """Raises UsageError for arguments that ask for more than a step's completions, or for part of a prompt's."""
    args = own.args
    for name, (nothing, instead) in _REFUSED.items():
        if getattr(args, name, nothing) != nothing:
            raise UsageError(f"{_name(own)}: {name}={getattr(args, name)!r} is not supported: {instead}")
    if getattr(args, "scale_rewards", None) == "batch":
        raise UsageError(f"{_name(own)}: scale_rewards='batch' is not supported: {_BATCH}")
    if args.steps_per_generation != args.gradient_accumulation_steps:
        raise UsageError(
            f"{_name(own)}: steps_per_generation={args.steps_per_generation} with gradient_accumulation_steps="
            f"{args.gradient_accumulation_steps} is not supported: each step trains on completions of its own; leave "
            "steps_per_generation and generation_batch_size out"
        )
    sizes = [("per_device_train_batch_size", own.num_generations)]
    if str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no":
        sizes.append(("per_device_eval_batch_size", own.num_generations_eval))
    for name, completions in sizes:
        if getattr(args, name) % completions:
            raise UsageError(
                f"{_name(own)}: {name}={getattr(args, name)} is no multiple of the {completions} completions of a "
                "prompt, which are compared within a micro-batch: so they are the same at every number of workers"
            )
