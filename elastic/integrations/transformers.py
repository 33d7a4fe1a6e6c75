"""`Trainer` of transformers, elastic: the same arguments, loss, collator, callbacks and evaluation.

    from elastic.integrations.transformers import Trainer      # instead of: from transformers import Trainer

    class ElasticSFTTrainer(SFTTrainer, Trainer): ...          # for a Trainer of a library, or a script's own

The training loop is `elastic.initialize` and its loader; everything around it is transformers' own. The global batch
is `per_device_train_batch_size * gradient_accumulation_steps * max_workers`, at every number of workers. The loss is
the mean over each micro-batch (`num_items_in_batch` is None). Checkpoints are the platform's.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from typing import Any

import torch

from elastic.core.errors import UsageError
from elastic.engines.foreign_loops import OWN
from elastic.engines.select import engine_kind
from elastic.integrations import (
    transformers_arguments,
    transformers_best,
    transformers_sequences,
    transformers_state,
    transformers_weights,
)
from elastic.integrations.engine_config import spec_of_generation
from elastic.training import api, context
from elastic.training.data.stream.foreign import passes_of
from elastic.training.engine import ElasticEngine
from elastic.training.in_loop.ahead import spec_alone
from elastic.training.saving.save_pretrained import whole_state

try:
    import transformers
    from accelerate.state import DistributedType, GradientState, PartialState
except ImportError as error:
    raise UsageError(
        "elastic.integrations.transformers needs transformers and accelerate: install the extra `hf` of ray-elastic"
    ) from error

logger = logging.getLogger(__name__)

# Where the Trainer's own state is in api.state.
_KEPT = "transformers.Trainer"


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """See the module. Raises UsageError, by name, for arguments and overrides that an elastic run cannot honour."""

    # Known to `foreign_loops`, which refuses the others.
    _is_elastic = True
    # Of transformers' own constructor.
    args: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    control: Any
    state: Any
    callback_handler: Any
    accelerator: Any
    _epoch: tuple[int, int]
    _began: float
    # Until the last step, of all generations.
    _seconds: float
    _shares_sequences = False
    _only_losses = True

    def create_accelerator_and_postprocess(self) -> None:
        """Called by the constructor. What accelerate keeps for the process is of the generation before: it is reset."""
        GradientState._reset_state()
        if api.get_context().device.type == "cpu":
            # Without it accelerate takes each rank for a run of its own: all would be process zero and log alone.
            self.args.use_cpu = True
        # Looked at again, it makes accelerate's state of the process anew: arguments may be older than the generation.
        self.args.__dict__.pop("_setup_devices", None)
        logger.debug("trains on %s", self.args.device)
        transformers_arguments.refuse(self, Trainer)
        super().create_accelerator_and_postprocess()
        setattr(self.accelerator, OWN, True)
        unwrap = self.accelerator.unwrap_model
        # Label smoothing asks the model for its name: DeepSpeed's engine is no causal language model.
        self.accelerator.unwrap_model = lambda model, *args, **kwargs: unwrap(_model_of(model), *args, **kwargs)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        # The engine's precision counts: accelerate would wrap the model's forward pass for good, to evaluate.
        return {**super()._build_accelerator_args(**kwargs), "mixed_precision": "no"}

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, **kwargs: Any) -> Any:
        """Trains to the end of the arguments or of the job, whichever is first. Continues where the run is."""
        if resume_from_checkpoint:
            raise UsageError("Trainer.train(resume_from_checkpoint=...): the platform resumes: `elastic resume RUN`")
        if trial is not None:
            raise UsageError("Trainer.train(trial=...): hyper-parameter search is not supported inside of a run")
        return super().train(**kwargs)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        raise UsageError("Trainer.hyperparameter_search is not supported inside of a run; start one run per trial")

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As transformers' own. Under ZeRO stage 3, with FSDP2, and where ranks share layers or experts, all ranks call
        it, and the weights go through rank 0's memory, under ZeRO in the type that the model computes in."""
        engine = self.model_wrapped
        if not isinstance(engine, ElasticEngine):
            super().save_model(output_dir, _internal_call)
            return
        # Ranks that wait for rank 0's files are no hang.
        with api.busy("saving the model"):
            if transformers_weights.everywhere(engine):
                super().save_model(output_dir, _internal_call)
            elif (weights := whole_state(engine, self.model)) and self.args.should_save:
                self._save(output_dir or self.args.output_dir, state_dict=weights)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """As transformers' own; where workers share sequences that of whole ones, by the workers' parts of them."""
        if not self._shares_sequences:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss, outputs = transformers_sequences.loss(model, inputs, return_outputs and not self._only_losses)
        return (loss, outputs) if return_outputs else loss

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any) -> Any:
        self._only_losses = prediction_loss_only
        return super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        with transformers_weights.told_of(self.model_wrapped):
            return super().evaluation_loop(*args, **kwargs)

    # -- the loop ------------------------------------------------------------------------------------------------------

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: Any = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        engine, loader = self._initialize()
        with transformers_weights.told_of(engine):
            return self._trained(engine, loader, ignore_keys_for_eval)

    def _trained(self, engine: Any, loader: Any, ignore_keys: list[str] | None) -> Any:
        if loader.plan.adaptive is not None:
            raise UsageError(
                "batch.adaptive does not go with Trainer, which counts epochs in steps of one size; leave it out"
            )
        self._begin_state(loader.plan.global_batch, loader.plan.dataset_size)
        self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
        if self.args.eval_on_start and self.state.global_step == 0:
            self._evaluate(None, ignore_keys, skip_scheduler=True)
        # A number of steps that is not reached in the epochs: they are repeated.
        epochs = None if self.args.max_steps > 0 else math.ceil(self.args.num_train_epochs)
        if self.state.global_step < self.state.max_steps:
            for epoch in api.epochs(epochs):
                self._elastic_epoch(engine, loader, epoch, ignore_keys)
                if self.control.should_training_stop:
                    break
        samples = self.state.max_steps * loader.plan.global_batch
        return self._finalize_training(None, samples, self._began)

    def _initialize(self) -> tuple[Any, Any]:
        # A worker that joins does all of this before the others pause for it, and its model makes their passes.
        spec = spec_alone() or spec_of_generation()
        kind = engine_kind(spec.engine)
        transformers_arguments.refuse_mesh(self, spec)
        self._shares_sequences = transformers_sequences.shares(self, spec.sp)
        config = transformers_arguments.engine_config(self.args, spec, self._micro_batch_size())
        dataset, collate = self._training_data()
        read: dict[str, Any] = {
            "collate_fn": collate,
            "num_workers": self.args.dataloader_num_workers,
            "prefetch_factor": self.args.dataloader_prefetch_factor,
        }
        resolved = kind.resolve(config, spec, None)
        self._planned_steps = self._steps(dataset, resolved.global_batch)
        transformers_arguments.compile_model(self.args, self.model)
        self._size = _size(self.model)
        # Engines drop groups without parameters, which the scheduler would have counted: of adapters none is without
        # weight decay.
        groups = self.create_optimizer().param_groups
        groups[:] = [group for group in groups if group["params"]]
        self.create_scheduler(num_training_steps=self._planned_steps, optimizer=self.optimizer)
        engine, self.optimizer, loader, scheduler = api.initialize(
            model=self.model,
            optimizer=self.optimizer,
            lr_scheduler=self.lr_scheduler,
            config=config,
            **self._ordered(dataset, resolved.micro_batch, read),
        )
        if PartialState().distributed_type == DistributedType.NO:
            engine.begin_again("accelerate takes this process for one that trains alone")
        if self.args.save_on_each_node and not transformers_weights.everywhere(engine):
            raise UsageError(
                "TrainingArguments.save_on_each_node is not supported where no worker has the whole model: worker 0 "
                "alone gathers and writes it; leave it out, with an output_dir that all nodes share"
            )
        engine.followers = frozenset({"accelerate", "transformers"})
        transformers_weights.mark_others(engine, vars(self).values())
        # Not to be prepared for an evaluation: accelerate would move the weights away from where ZeRO has them.
        self.accelerator._models.append(self.model)
        self.lr_scheduler = scheduler
        self.model_wrapped = engine
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = loader
        return engine, loader

    def _ordered(self, dataset: Any, micro_batch: int, read: dict[str, Any]) -> dict[str, Any]:
        """What `initialize` reads: a DataLoader says that samples come in the dataset's order. A stream has its own."""
        if not (self._sequential() and _has_length(dataset)):
            return {"training_data": dataset, **read}
        return {"training_data": torch.utils.data.DataLoader(dataset, micro_batch, shuffle=False, **read)}

    def _sequential(self) -> bool:
        """Are samples taken as they stand in the dataset?"""
        return bool(getattr(self.args, "train_sampling_strategy", "random") == "sequential")

    def _micro_batch_size(self) -> int:
        """In samples of the dataset."""
        return int(self.args.per_device_train_batch_size)

    def _training_data(self) -> tuple[Any, Any]:
        """The dataset and the collator, without the columns that the model does not take."""
        dataset = self.train_dataset
        if dataset is None:
            raise UsageError("Trainer: training needs a train_dataset")
        if _has_length(dataset) and type(dataset).__module__.partition(".")[0] == "datasets":
            return self._remove_unused_columns(dataset, description="training"), self.data_collator
        collate = self._get_collator_with_removed_columns(self.data_collator, description="training")
        if _has_length(dataset):
            return dataset, collate
        return passes_of(dataset), collate

    def _steps(self, dataset: Any, global_batch: int) -> int:
        if self.args.max_steps > 0:
            # The constructor has insisted on it where the dataset has no length.
            return int(self.args.max_steps)
        return math.ceil(float(self.args.num_train_epochs) * len(dataset) / global_batch)

    def _begin_state(self, global_batch: int, dataset_size: int | None) -> None:
        """A fresh TrainerState, and what the run has kept of the last one. `dataset_size` is None for a stream."""
        epochs, per_epoch = math.ceil(self.args.num_train_epochs), self._planned_steps
        if dataset_size is None:
            # transformers' own count of epochs that nobody knows.
            epochs = sys.maxsize
        else:
            per_epoch = max(1, dataset_size // global_batch)
        self._init_training_state(self._planned_steps, per_epoch, epochs, None, None)
        self.state.max_steps = self._planned_steps
        self._samples = (global_batch, dataset_size)
        self._initial_num_input_tokens_seen = 0
        self._take_up()

    def _follow(self, epoch: int) -> None:
        """The loader may have gone over to another generation since: its ranks, and the state that was restored."""
        generation = context.current()
        if generation is not None and generation.scope.spec.generation != self._generation:
            reports = self.state.is_world_process_zero
            self._take_up()
            if self.state.is_world_process_zero and not reports:
                # Progress bars and loggers begin there, on this rank alone.
                self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
        if epoch != self._epoch[0]:
            self._epoch = (epoch, self.state.global_step)

    def _take_up(self) -> None:
        """What the Trainer does is of the run. What accelerate knows of the process, it has been told already."""
        generation, kept = context.current(), api.state.get(_KEPT, {})
        assert generation is not None
        spec = generation.scope.spec
        self._generation = spec.generation
        # Persistent ones share the evaluation data out among the ranks of the generation that has made them.
        self.__dict__.pop("_eval_dataloaders", None)
        self.state.is_local_process_zero = self.is_local_process_zero()
        self.state.is_world_process_zero = self.is_world_process_zero()
        self.state.global_step = generation.scope.step
        # The epoch under way and the steps before it: the length of a stream's is known at its end.
        self._epoch = tuple(kept.get("epoch", (0, 0)))
        self.state.epoch = self._epochs_done()
        self._best = transformers_best.BestWeights(generation.scope, self.args.output_dir, kept.get("best_saved"))
        self.state.best_model_checkpoint = self._best.folder
        transformers_state.take_up(self, kept)
        # A step's control is that of the last function's end.
        self.control.should_training_stop = False
        self.current_flos, self._rate = 0.0, None

    def _epochs_done(self) -> float:
        """As transformers counts them: where an epoch has no length, it is as long as the training."""
        (global_batch, dataset_size), step = self._samples, self.state.global_step
        if dataset_size is not None:
            return float(step * global_batch / dataset_size)
        epoch, before = self._epoch
        return float(epoch + (step - before) / self._planned_steps)

    def _elastic_epoch(self, engine: Any, loader: Any, epoch: int, ignore_keys: list[str] | None) -> None:
        self._follow(epoch)
        self.control = self.callback_handler.on_epoch_begin(self.args, self.state, self.control)
        first, ended = True, False
        for inputs in loader:
            ended = False
            self._follow(epoch)
            if first:
                self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)
            first = self._micro_batch(engine, inputs)
            if engine.abandoned:
                # The next batch is of a step that begins, or goes on, with other ranks.
                first = True
                continue
            if not first:
                self.control = self.callback_handler.on_substep_end(self.args, self.state, self.control)
                continue
            self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
            with engine.leaving_failed_steps():
                self._after(engine, epoch, ignore_keys)
                if _is_last(loader, epoch, self.state.global_step):
                    # Before the loader is asked whether there is more: what is lost here is lost within the epoch.
                    self._epoch_ends(engine, epoch, ignore_keys)
                    ended = True
            if engine.abandoned:
                # A peer was lost in an evaluation, say. The step is done again, with all that follows it.
                self.control = transformers.TrainerControl()
            if self.control.should_epoch_stop or self.control.should_training_stop:
                break
        if not ended:
            self._follow(epoch)
            self._epoch_ends(engine, epoch, ignore_keys)

    def _epoch_ends(self, engine: Any, epoch: int, ignore_keys: list[str] | None) -> None:
        self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
        self._after(engine, epoch, ignore_keys)

    def _micro_batch(self, engine: Any, inputs: Any) -> bool:
        """Forward, backward and the engine's step; True where this was the last micro-batch of an optimizer step."""
        share, self._passed = engine.batch_share, False
        try:
            self.training_step(engine, inputs, None)
        except Exception as error:
            # A collective of `compute_loss`, say: TRL gathers what it logs in each pass.
            if not engine.abandons(error):
                raise
            return False
        if not self._passed:
            raise UsageError(
                "elastic.integrations.transformers.Trainer: an override of training_step that does not call "
                "super().training_step(...) is not supported; override compute_loss"
            )
        if share:
            # Counted by the model as it was before ranks got slices and shards of it, and once by all of a cell.
            whole = self._size / max(1, _size(self.model)) / spec_of_generation().mesh.per_cell
            self.current_flos += float(self.floating_point_ops(inputs)) * whole
        last = bool(engine.is_gradient_accumulation_boundary())
        step_loss = self._whole_loss(engine) if last else None
        if last and not engine.abandoned:
            # transformers logs the rate that the step is made with.
            self._rate = self._get_learning_rate()
            self.control = self.callback_handler.on_pre_optimizer_step(self.args, self.state, self.control)
        engine.step()
        if step_loss is not None and not engine.abandoned:
            self._add_loss(step_loss)
            self.control = self.callback_handler.on_optimizer_step(self.args, self.state, self.control)
            self.state.global_step += 1
            self.state.epoch = self._epochs_done()
        return last

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """The passes of a micro-batch through the engine. Returns the loss, detached."""
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss: torch.Tensor = self.compute_loss(model, inputs)
        model.backward(loss)
        self._passed = True
        return loss.detach()

    def _whole_loss(self, engine: Any) -> torch.Tensor:
        """The mean over the global batch, at every number of ranks. Gathered in each step, as transformers gathers the
        number of items: what has not been logged yet would be lost with its rank. Before the update: a rank that is
        lost here costs this step alone. With it goes how long the training takes, by rank 0's clock: what is kept of a
        step is the same on all ranks, or they would take it for changed (`in_loop.unfinished`)."""
        seconds = time.time() - self._began if self.state.is_world_process_zero else 0.0
        total = torch.tensor([float(engine.step_loss), seconds], dtype=torch.float64, device=self.args.device)
        if not engine.abandoned:
            try:
                torch.distributed.all_reduce(total)
                self._seconds = float(total[1])
            except Exception as error:
                if not engine.abandons(error):
                    raise
        return total[0]

    def _add_loss(self, step_loss: torch.Tensor) -> None:
        if self.args.logging_nan_inf_filter and not torch.isfinite(step_loss):
            # transformers' own rule: the average since the last line.
            step_loss = self._tr_loss / (1 + self.state.global_step - self._globalstep_last_logged)
        self._tr_loss += step_loss

    def _after(self, engine: Any, epoch: int, ignore_keys: list[str] | None) -> None:
        """Logs, evaluates and asks for a save where the arguments say so; what the next function needs is kept."""
        asked, self._saved, lines = self.control.should_save, False, len(self.state.log_history)
        with api.busy("evaluating"):
            self._maybe_log_save_evaluate(
                self._tr_loss, engine.get_global_grad_norm(), engine, None, epoch, ignore_keys, self._began, self._rate
            )
        transformers_state.take_first_ranks_log(self.state, lines)
        if asked and not self._saved:
            # An override writes something else: the platform's is not left out for it.
            engine.save_checkpoint()
        best = self.args.load_best_model_at_end and self.state.best_global_step == self.state.global_step
        if best and (asked or self._saved):
            with api.busy("saving the best weights"):
                self._best.write(engine, self.model, self.state.global_step)
            self.state.best_model_checkpoint = self._best.folder
        self._keep()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """The platform's own save, of this step."""
        self._saved = True
        self.model_wrapped.save_checkpoint()

    def _load_best_model(self) -> None:
        with api.busy("loading the best weights"):
            self._best.load(self.model_wrapped, self.model)

    def _finalize_training(self, *args: Any) -> Any:
        # transformers would remove checkpoints from `output_dir`: what is there is of other runs.
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            return super()._finalize_training(*args)
        finally:
            self.args.save_total_limit = limit

    def _keep(self) -> None:
        api.state[_KEPT] = {**transformers_state.kept(self), "best_saved": self._best.step, "epoch": self._epoch}


def _is_last(loader: Any, epoch: int, step: int) -> bool:
    """Is this step known to be the last one of the epoch, or of the run?"""
    plan = loader.plan
    return bool(step == plan.last_step or (plan.finite is None and plan.epoch(step) != epoch))


def _size(model: Any) -> int:
    """What `floating_point_ops` counts passes by."""
    return int(model.num_parameters(exclude_embeddings=True)) if hasattr(model, "num_parameters") else 1


def _has_length(dataset: Any) -> bool:
    return hasattr(dataset, "__len__")


def _model_of(model: Any) -> Any:
    return model.module if isinstance(model, ElasticEngine) else model
