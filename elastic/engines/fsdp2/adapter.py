"""`Engine` over one model under `fully_shard`."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from elastic.comm.collective_ledger import CollectiveLedger
from elastic.core.checkpoint.manifest import Json
from elastic.core.errors import UsageError
from elastic.engines import saved_numbers
from elastic.engines.base import GradientSums, ResolvedConfig, StepOutcome
from elastic.engines.fsdp2.belongings import Belongings
from elastic.engines.fsdp2.collectives import CountedExchanges, count_collectives
from elastic.engines.fsdp2.experts import count_exchanges, end_exchanges
from elastic.engines.fsdp2.fragments import fragments, numbers
from elastic.engines.fsdp2.gathered import gathered_at_once
from elastic.engines.fsdp2.gradients import clip, local_gradients, require_none, total_norm
from elastic.engines.fsdp2.layers.tensor_parallel import require_local
from elastic.engines.fsdp2.meshes import (
    COPIES,
    EXPERTS,
    SAME_EXPERTS,
    SHARD,
    Meshes,
    compile_each_size,
    cut_off,
    forget_compiled,
)
from elastic.engines.fsdp2.sharding import gathered, reshard
from elastic.engines.fsdp2.state import Fsdp2State
from elastic.engines.fsdp2.update.update import Update
from elastic.engines.json_values import decode, encode
from elastic.engines.last_output import LastOutput
from elastic.engines.live_state import Fragment
from elastic.engines.model.extra_state import install_modules, read_modules
from elastic.engines.model.precision import Precision
from elastic.engines.model.update_rates import scaled_rates
from elastic.engines.model.whole_gradients import WholeGradients

_COUNTERS = ("global_steps", "skipped_steps")
_ADDED_UP = (
    "let tp_plan add them up (SequenceParallel(use_local_output=True) for the module, with the dimension that ranks "
    "have parts of as sequence_dim)"
)


class Fsdp2Engine:
    """What users reach through `engine.<attribute>`, under the names that DeepSpeed gave them."""

    def __init__(
        self,
        module: Any,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        resolved: ResolvedConfig,
        device: torch.device,
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.lr_scheduler = scheduler
        self.device = device
        self.local_rank = device.index or 0
        self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.global_steps = 0
        self.skipped_steps = 0
        self._resolved = resolved
        self._norm: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        """The model's own, as with DeepSpeed: `engine.generate`, `engine.config`."""
        module = vars(self).get("module")
        if module is None or name.startswith("__") or not hasattr(module, name):
            raise AttributeError(f"{type(self).__name__} has no {name!r}, nor has the model")
        return getattr(module, name)

    @property
    def training(self) -> bool:
        return bool(self.module.training)

    def train(self, mode: bool = True) -> Fsdp2Engine:
        self.module.train(mode)
        return self

    def eval(self) -> Fsdp2Engine:
        return self.train(False)

    def parameters(self) -> Any:
        return self.module.parameters()

    def named_parameters(self) -> Any:
        return self.module.named_parameters()

    def get_lr(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """Of the last step, before clipping."""
        return None if self._norm is None else float(self._norm)

    @property
    def options(self) -> Mapping[str, Any]:
        """Those of `config.Options`, at this world size."""
        return self._resolved.native

    def gradient_accumulation_steps(self) -> int:
        return self._resolved.micro_steps

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._resolved.micro_batch

    def gradient_clipping(self) -> float:
        return float(self._resolved.native["gradient_clipping"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.module.zero_grad(set_to_none)


class Fsdp2Adapter:
    """Implements `elastic.engines.base.Engine`."""

    name = "fsdp2"
    judged = True
    sums: GradientSums | str = "fully_shard keeps partial sums to itself"

    def __init__(
        self,
        native: Fsdp2Engine,
        meshes: Meshes,
        device: torch.device,
        resolved: ResolvedConfig,
        withhold: bool,
        belongings: Belongings | str,
    ) -> None:
        """`withhold`: a step with a non-finite gradient is not applied, at the cost of waiting for the device.
        `belongings`: or why the model cannot be given back."""
        self.native: Any = native
        self.module: torch.nn.Module = native.module
        self.device = device
        self.data_group: dist.ProcessGroup = meshes.dp.get_group()
        self._meshes: Any = meshes
        self._micro_steps = resolved.micro_steps
        self._clipping = float(resolved.native["gradient_clipping"])
        self._withhold = withhold
        self._belongings = belongings
        self._last, self._begun = True, False
        self._rate_factor: Callable[[], float] = lambda: 1.0
        self._output = LastOutput.of(self.module)
        self.ledger = CollectiveLedger(device, {self.data_group: "dp"})
        count_collectives(self.module, self.ledger)
        self._counted = CountedExchanges(self.ledger)
        self._whole_gradients: WholeGradients | None = None
        if meshes.copies is not None:
            self.ledger.name_axis(meshes.copies, COPIES)
            self.ledger.name_axis(meshes.shards.get_group(), SHARD)
            self._counted.install_all_reduce()
        self.ledger.remark = _grouped(meshes, native.world_size, resolved.native["shard_workers"])
        if meshes.experts is not None:
            assert meshes.exchange is not None
            self.ledger.name_axis(meshes.exchange, EXPERTS)
            self.ledger.name_axis(meshes.experts[SAME_EXPERTS].get_group(), SAME_EXPERTS)
            count_exchanges(self.module, self.ledger)
        if meshes.tp is not None:
            self.ledger.name_axis(meshes.tp.get_group(), "tp")
            self._compile_any_size = compile_each_size()
            self._counted.install()
            self._whole_gradients = WholeGradients(meshes.tp.get_group(), device, _ADDED_UP)
        self._all_reduce = self.ledger.timed("all_reduce", dist.all_reduce)
        assert meshes.stage is not None
        exchange = self.ledger.timed("all_to_all_single", dist.all_to_all_single)
        self._step_optimizer: Update | None = Update(native.optimizer, device, meshes.stage, exchange)
        # What the ledger showed at the first forward pass of the step; None between two steps.
        self._began_s: float | None = None

    def forward(self, inputs: Sequence[Any], named: Mapping[str, Any], last: bool | None) -> Any:
        if last is not None:
            self.ends_step(last)
        output = self._output.seen(self.module(*inputs, **named), self.module.training)
        if self._meshes.tp is not None:
            require_local(output, "the model's output")
        return output

    def ends_step(self, last: bool) -> None:
        self._last = last
        module: Any = self.module
        # Within a step gradients are added up on each rank and reduced once, with its last micro-batch.
        module.set_requires_gradient_sync(last)
        module.set_is_last_backward(last)
        if self._began_s is None:
            self._began_s = self.ledger.waited_s

    def forward_alone(self, inputs: Sequence[Any], named: Mapping[str, Any]) -> Any:
        return self._output.zeros()

    def gathered(self) -> AbstractContextManager[None]:
        return gathered_at_once(self.module)

    def precision(self) -> Precision | None:
        options = self.native.options
        # Of what modules give in another type than they compute in nothing is said here.
        if self._meshes.lanes > 1 or self._meshes.experts is not None or options["output_dtype"] is not None:
            return None
        found = Precision.of(self.module)
        if (computes := options["param_dtype"]) is None:
            return found
        kept = {name: buffer.dtype for name, buffer in self.module.named_buffers() if buffer.is_floating_point()}
        return Precision(getattr(torch, computes), kept, casts_inputs=options["cast_forward_inputs"])

    def backward(self, loss: torch.Tensor, named: Mapping[str, Any]) -> torch.Tensor:
        if not self._begun:
            require_none(self.leaves())
            self._begun = True
        with self._comparing():
            # torch's types do not know them.
            (loss / self._micro_steps).backward(**named)  # type: ignore[no-untyped-call]
        return loss

    def _comparing(self) -> AbstractContextManager[None]:
        whole = self._whole_gradients
        if whole is None or whole.compared:
            return nullcontext()
        return whole.compare({name: leaf for name, leaf in self.leaves().items() if not isinstance(leaf, DTensor)})

    def scale_rates(self, factor: Callable[[], float]) -> None:
        self._rate_factor = factor

    def clip(self, largest: float) -> None:
        self._clipping = largest

    def step(self, inputs: Sequence[Any], named: Mapping[str, Any], consumed: int) -> StepOutcome | None:
        """Raises UsageError for arguments: torch's optimizers take a closure, which would run the step again."""
        if inputs or named:
            raise UsageError(f"engine.step takes no arguments with the fsdp2 engine, got {[*inputs, *named]}")
        return self._update() if self._last else None

    def _gradients(self) -> list[tuple[torch.Tensor, int]]:
        """Of the parameters that have one, in the optimizer's order, and how many ranks have the same shard of it."""
        stepped = (parameter for group in self.native.optimizer.param_groups for parameter in group["params"])
        tp, copies = self._meshes.tp, self._meshes.copies
        return local_gradients(stepped, 1 if tp is None else tp.size(), 1 if copies is None else copies.size())

    def _update(self) -> StepOutcome:
        """The optimizer's step, from gradients that are reduced. Collective."""
        native, gradients = self.native, self._gradients()
        everybody = self.data_group if self._meshes.lanes == 1 else dist.group.WORLD
        norm = native._norm = total_norm(gradients, self.device, everybody, self._all_reduce)
        applied = not self._withhold or math.isfinite(float(norm))
        if applied:
            if self._clipping:
                clip([gradient for gradient, _ in gradients], norm, self._clipping)
            with scaled_rates(native.optimizer.param_groups, self._rate_factor()):
                assert self._step_optimizer is not None
                self._step_optimizer()
            if native.lr_scheduler is not None:
                native.lr_scheduler.step()
        else:
            native.skipped_steps += 1
        native.global_steps += 1
        self.module.zero_grad(set_to_none=True)
        rates = tuple(
            float(group["lr"]) * self._rate_factor() for group in native.optimizer.param_groups if "lr" in group
        )
        began_s, self._began_s = self._began_s, None
        return StepOutcome(
            applied=applied,
            grad_norm=norm,
            learning_rates=rates,
            collective_s=None if began_s is None or self.ledger.on_device else self.ledger.waited_s - began_s,
            collectives=self.ledger.take(),
        )

    def leaves(self) -> dict[str, torch.Tensor]:
        return gathered(self.module)

    def state(self) -> Fsdp2State:
        native, update = self.native, self._step_optimizer
        others = () if update is None else update.others
        state = Fsdp2State(self.module, native.optimizer, native.lr_scheduler, self._meshes, others)
        # A scheduler that cannot be carried is refused now, not at the first snapshot.
        self.extra_state()
        return state

    def extra_state(self) -> dict[str, Json]:
        return {
            "engine": {name: int(getattr(self.native, name)) for name in _COUNTERS},
            "loss_scaler": {"kind": "none", "values": {}},
            "scheduler": _read_scheduler(self.native.lr_scheduler),
            "modules": read_modules(self.module),
        }

    def fragments(self, names: Collection[str] | None = None) -> Iterator[Fragment]:
        return fragments(self.native, names)

    def wrong_numbers(self, saved: Mapping[str, Json], names: Collection[str] | None = None) -> list[str]:
        native = self.native
        counters = {name: getattr(native, name) for name in ("global_steps", "skipped_steps")}
        return saved_numbers.wrong_numbers(
            saved, counters, native.lr_scheduler, native.optimizer.param_groups, numbers(native, names)
        )

    def expected_extra_state(self, saved: Mapping[str, Json]) -> dict[str, Json]:
        return {
            "engine": {name: int(saved["engine"][name]) for name in _COUNTERS},
            "loss_scaler": {"kind": "none", "values": {}},
            "scheduler": saved["scheduler"],
            "modules": saved.get("modules", read_modules(self.module)),
        }

    def load_extra_state(self, saved: Mapping[str, Json]) -> None:
        install_modules(self.module, saved.get("modules"))
        if saved["scheduler"] is not None:
            self.native.lr_scheduler.load_state_dict(decode(saved["scheduler"]["state"]))
        for name in _COUNTERS:
            setattr(self.native, name, int(saved["engine"][name]))

    def obstacle(self) -> str | None:
        return self._belongings if isinstance(self._belongings, str) else None

    def detach(self) -> None:
        belongings = self._belongings
        self.close()
        if isinstance(belongings, Belongings):
            belongings.give_back()

    def close(self) -> None:
        native, self.native, self._belongings = self.native, None, "the engine is closed"
        if native is not None:
            native.module.zero_grad(set_to_none=True)
            reshard(native.module)
            end_exchanges(native.module)
        meshes, self._meshes = self._meshes, None
        if meshes is not None and meshes.tp is not None:
            forget_compiled()
            self._compile_any_size()
        self._counted.remove()
        self.ledger.close()
        self._whole_gradients = self._step_optimizer = None
        self._output.forget()
        if meshes is not None:
            cut_off(meshes)
        self.module = torch.nn.Identity()


def _grouped(meshes: Meshes, world_size: int, wanted: int | None) -> str:
    """In words over how many workers shards lie where a run has asked for copies of them; "" where as ever."""
    stages = 1 if meshes.pp is None else meshes.pp.size()
    workers, of_stage = world_size // stages, " of a stage" if stages > 1 else ""
    if meshes.copies is not None:
        copies = meshes.copies.size()
        return f"shards over {workers // copies} workers{of_stage}, sums over {copies} copies of each"
    if wanted in (None, workers):
        return ""
    return (
        f"shards over all workers{of_stage}: {workers} are not several whole groups of {wanted} (fsdp2.shard_workers)"
    )


def _read_scheduler(scheduler: Any) -> Json:
    if scheduler is None:
        return None
    name = type(scheduler).__name__
    return {
        "class": name,
        "state": encode(dict(scheduler.state_dict()), f"the state of learning-rate scheduler {name}"),
    }
