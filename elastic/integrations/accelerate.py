"""`Accelerator` of accelerate, elastic: the script's loop stays as it is.

    from elastic.integrations.accelerate import Accelerator      # instead of: from accelerate import Accelerator

`prepare` of model, optimizer and training data is `elastic.initialize`. The global batch is that of the DataLoader,
times `gradient_accumulation_steps`, times `max_workers`, at every number of workers. Everything else, evaluations,
`gather`, trackers, is accelerate's own. Checkpoints are the platform's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.data import DataLoader

from elastic.core.errors import UsageError
from elastic.integrations import accelerate_arguments as arguments
from elastic.integrations.accelerate_ends import PREPARED
from elastic.integrations.accelerate_objects import (
    PreparedLoader,
    PreparedModel,
    PreparedOptimizer,
    PreparedScheduler,
    Updates,
)
from elastic.integrations.engine_config import spec_of_generation, workers_planned
from elastic.integrations.transformers_arguments import refuse_axes
from elastic.integrations.transformers_weights import everywhere
from elastic.training import api
from elastic.training.data.stream.foreign import passes_of
from elastic.training.in_loop.ahead import asker, spec_alone
from elastic.training.user import accelerate_calls
from elastic.training.watch.once import warn_once

try:
    import accelerate
    from accelerate.state import DistributedType, GradientState, PartialState
    from accelerate.utils import recursively_apply
except ImportError as error:
    raise UsageError(
        "elastic.integrations.accelerate needs accelerate: install the extra `hf` of ray-elastic"
    ) from error

logger = logging.getLogger(__name__)

_NAME = "elastic.integrations.accelerate.Accelerator"


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """See the module. Raises UsageError, by name, for arguments and calls that an elastic run cannot honour."""

    # Known to `foreign_loops`, which refuses the others.
    _is_elastic = True
    # Of accelerate's own constructor.
    state: Any
    device: torch.device
    distributed_type: Any
    gradient_state: Any
    updates: Updates

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = arguments.given(accelerate.Accelerator, args, kwargs)
        arguments.refuse(given)
        self._precision = arguments.precision(given)
        # What accelerate keeps for the process is of the function's last call.
        GradientState._reset_state()
        # On CPUs accelerate would take each rank for a run of its own otherwise. The engine's precision counts.
        cpu = api.get_context().device.type == "cpu"
        super().__init__(**{**given, "mixed_precision": "no", "cpu": cpu})
        arguments.refuse_type(self.distributed_type)
        self.updates = Updates(self.gradient_state)
        self.updates.in_16_bits = self._precision != "no"

    # -- preparing -----------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """accelerate's, in one call or in several: the engine is built when the model that is trained, its optimizer
        and its DataLoader are there. That is the first DataLoader that shuffles, else the first that is given with the
        model or after it; the others are evaluated on."""
        places = device_placement or [None] * len(args)
        pieces = self.updates.pieces
        pieces.note(args)
        prepared = tuple(self._prepared(each, place) for each, place in zip(args, places, strict=True))
        if pieces.complete and not self.updates.begun:
            self._initialize()
        # Schedulers last: their state is restored with the engine's.
        prepared = tuple(self.prepare_scheduler(each) if arguments.is_scheduler(each) else each for each in prepared)
        return prepared if len(prepared) > 1 else prepared[0]

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """As `prepare` of it alone. With `evaluation_mode` it is put on the device."""
        if not evaluation_mode:
            return self.prepare(model, device_placement=[device_placement])
        return model.to(self.device) if _or(device_placement, self.device_placement) else model

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        return self.prepare(optimizer, device_placement=[device_placement])

    def prepare_scheduler(self, scheduler: Any) -> Any:
        spec = spec_alone() or spec_of_generation()
        prepared = PreparedScheduler(scheduler, self, workers_planned(spec))
        self._schedulers.append(prepared)
        api.state.register(**{f"{PREPARED}{len(self._schedulers)}": scheduler})
        return prepared

    def _prepared(self, each: Any, place: bool | None) -> Any:
        pieces = self.updates.pieces
        if each is None:
            return None
        if each is pieces.model:
            return PreparedModel(each, self.updates)
        if each is pieces.optimizer:
            return PreparedOptimizer(each, self.updates)
        if each is pieces.loader:
            return PreparedLoader(each, self.updates, self.device if _or(place, self.device_placement) else None)
        if isinstance(each, DataLoader):
            return self.prepare_data_loader(each, device_placement=place)
        if isinstance(each, torch.nn.Module):
            return self.prepare_model(each, place, evaluation_mode=True)
        return each

    def _initialize(self) -> None:
        # A worker that joins does all of this before the others pause for it, and its model makes their passes.
        spec, pieces = spec_alone() or spec_of_generation(), self.updates.pieces
        refuse_axes(_NAME, spec)
        if self.split_batches:
            raise UsageError(f"{_NAME}: split_batches: give the DataLoader the batch size of one worker, without it")
        config = arguments.engine_config(self._precision, self.gradient_accumulation_steps, pieces.loader, spec)
        arguments.compile_model(self.state.dynamo_plugin, pieces.model)
        engine, _, batches, _ = api.initialize(
            model=pieces.model, optimizer=pieces.optimizer, config=config, **_read(pieces.loader)
        )
        if PartialState().distributed_type == DistributedType.NO:
            engine.begin_again("accelerate takes this process for one that trains alone")
        engine.followers = frozenset({"accelerate"})
        # Scripts save `if accelerator.is_main_process`.
        engine.follow_rank_0()
        clipping = (spec.engine_config or {}).get("gradient_clipping")
        self.updates.begin(engine, batches, workers_planned(spec), clipping)

    # -- the loop ------------------------------------------------------------------------------------------------------

    @property
    def sync_gradients(self) -> bool:
        """Does the step end with the batch at hand? False where the step is abandoned, and made with later batches, and
        where it is a repeated one that the script has seen before."""
        return self.updates.shows_end()

    @property
    def optimizer_step_was_skipped(self) -> bool:
        return self.updates.skipped

    @property
    def gradient_accumulation_steps(self) -> int:
        return int(self.gradient_state.num_steps)

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        if self.updates.begun:
            raise UsageError(f"{_NAME}: gradient_accumulation_steps is fixed by prepare; set it before")
        self.gradient_state.plugin_kwargs.update({"num_steps": value})

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """The engine knows where a step ends: how many batches of a worker are in one depends on how many there are."""
        yield

    @contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        yield

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """`loss` is the mean over the batch, as with accelerate: not divided by the accumulation."""
        if kwargs:
            raise UsageError(f"{_NAME}: backward({', '.join(kwargs)}=...) is not supported")
        self.updates.backward(loss)

    @contextmanager
    def autocast(self, autocast_handler: Any = None) -> Iterator[None]:
        """accelerate's, in the precision that it was given. The model computes in it without."""
        dtype = arguments.DTYPES.get(self._precision)
        options = {} if autocast_handler is None else autocast_handler.to_kwargs()
        with nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype, **options):
            yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Where the step ends, the update is made here, and the norm returned before clipping; `optimizer.step()` is to
        follow. None for the other batches of a step. Raises UsageError where the job clips to another norm."""
        if not arguments.clips(self.updates.engine.module, parameters, norm_type):
            return torch.zeros((), device=self.device)
        return self.updates.clip(float(max_norm), self.device)

    def clip_grad_value_(self, *_: Any, **__: Any) -> None:
        raise UsageError(f"{_NAME}: clip_grad_value_ is not supported, gradients are on several workers; clip by norm")

    def gather(self, tensor: Any) -> Any:
        """accelerate's. In a step that is abandoned, as a peer was lost, this worker's own values in every place."""
        self.updates.leave_loop()
        try:
            return super().gather(tensor)
        except Exception as error:
            if not self._abandons(error):
                raise
            return recursively_apply(self._in_every_place, tensor)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """accelerate's. In a step that is abandoned this worker's own values."""
        self.updates.leave_loop()
        try:
            return super().reduce(tensor, reduction, scale)
        except Exception as error:
            if not self._abandons(error):
                raise
            return tensor

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        self.updates.leave_loop()
        return super().pad_across_processes(tensor, dim, pad_index, pad_first)

    def wait_for_everyone(self) -> None:
        self.updates.leave_loop()
        super().wait_for_everyone()

    def _abandons(self, error: Exception) -> bool:
        return self.updates.begun and self.updates.engine.abandons(error)

    def _in_every_place(self, tensor: torch.Tensor) -> torch.Tensor:
        """[...] -> [processes * n, ...]"""
        own = tensor[None] if tensor.ndim == 0 else tensor
        return own.repeat(self.state.num_processes, *[1] * (own.ndim - 1))

    def check_trigger(self) -> bool:
        """accelerate's, where a step ends: a loop that was left within a step would leave it unfinished."""
        return bool(self.gradient_state.sync_gradients and super().check_trigger())

    # -- what rank it is -----------------------------------------------------------------------------------------------

    @property
    def num_processes(self) -> int:
        """Before the first batch the most that the run may have, by which scripts scale schedules; in the loop those
        that there are."""
        if asker() != "accelerate" and not self.updates.given:
            return workers_planned(spec_alone() or spec_of_generation())
        return int(self.state.num_processes)

    # Asked of the platform: a function that has asked in its set-up is called again where it becomes rank 0.

    @property
    def process_index(self) -> int:
        return api.get_context().rank

    @property
    def is_main_process(self) -> bool:
        return api.get_context().rank == 0

    @property
    def is_last_process(self) -> bool:
        here = api.get_context()
        return here.rank == here.world_size - 1

    # -- saving --------------------------------------------------------------------------------------------------------

    def save_state(self, output_dir: Any = None, *_: Any, **__: Any) -> Any:
        """One more save of the platform's. Returns `output_dir`. In an epoch rank 0 alone may call it."""
        return accelerate_calls.save_state(self, output_dir)

    def load_state(self, *_: Any, **__: Any) -> None:
        accelerate_calls.load_state(self)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Their state is saved and restored with the run's, as by `elastic.state.register`."""
        begin = len(self._custom_objects)
        super().register_for_checkpointing(*objects)
        api.state.register(**{f"accelerate_object_{begin + place}": each for place, each in enumerate(objects, 1)})

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> Any:
        _hook_not_called("register_save_state_pre_hook")
        return super().register_save_state_pre_hook(hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> Any:
        _hook_not_called("register_load_state_pre_hook")
        return super().register_load_state_pre_hook(hook)

    def unwrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        own = self.updates.pieces.model if type(model) is PreparedModel else model
        return super().unwrap_model(own, *args, **kwargs)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """The whole model's. Where it is on several workers all of them call it; None on others than the first."""
        self.updates.leave_loop()
        engine = self.updates.engine if self.updates.trains(model) else None
        if engine is None or everywhere(engine):
            return super().get_state_dict(model, unwrap)
        with api.busy("gathering the weights"):
            return engine.whole_weights() or None

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        if isinstance(dataloader, PreparedLoader):
            raise UsageError(f"{_NAME}: skip_first_batches: the loader goes on where the run is; leave it out")
        return super().skip_first_batches(dataloader, num_batches)

    def free_memory(self, *objects: Any) -> Any:
        """As accelerate's; the run's engine is freed with its generation."""
        return super().free_memory(*(None if type(each) is PreparedModel else each for each in objects))

    @property
    def mixed_precision(self) -> str:
        return self._precision


def _or(place: bool | None, usual: bool) -> bool:
    return usual if place is None else place


def _read(loader: DataLoader[Any]) -> dict[str, Any]:
    """What `initialize` reads. A DataLoader of what has no length is its dataset, with what the loader says."""
    if hasattr(loader.dataset, "__len__"):
        return {"training_data": loader}
    return {
        "training_data": passes_of(loader.dataset),
        "collate_fn": loader.collate_fn,
        "num_workers": loader.num_workers,
        "prefetch_factor": loader.prefetch_factor,
    }


def _hook_not_called(name: str) -> None:
    warn_once(
        logger,
        f"accelerator.{name}: the hook is not called, the platform saves and restores in its own format; what it keeps "
        "besides model, optimizer and schedulers belongs into accelerator.register_for_checkpointing",
    )
