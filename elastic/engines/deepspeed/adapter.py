"""`Engine` over one DeepSpeedEngine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from elastic.comm.collective_ledger import CollectiveLedger
from elastic.core.checkpoint.manifest import Json
from elastic.core.errors import UsageError
from elastic.engines.base import GradientSums, StepOutcome
from elastic.engines.deepspeed import extra_state
from elastic.engines.deepspeed.belongings import Belongings
from elastic.engines.deepspeed.collectives import CountedBackend
from elastic.engines.deepspeed.experts.placement import is_repeated
from elastic.engines.deepspeed.fetch_order import fetched_at_once
from elastic.engines.deepspeed.nonfinite import NonFinite
from elastic.engines.deepspeed.state.fragments import fragments
from elastic.engines.deepspeed.state.gradient_sums import KeptSums, gradient_sums, release
from elastic.engines.deepspeed.state.live_numbers import expected_numbers, wrong_numbers
from elastic.engines.deepspeed.state.open import open_zero_state
from elastic.engines.deepspeed.state.zero import ZeroState
from elastic.engines.deepspeed.teardown import forget_graphs, hollow_out, release_engine
from elastic.engines.last_output import LastOutput
from elastic.engines.live_state import Fragment
from elastic.engines.model.compiled import compiles
from elastic.engines.model.cuts import Cuts
from elastic.engines.model.precision import Precision
from elastic.engines.model.shared_layers import explain
from elastic.engines.model.update_rates import scaled_rates, updating
from elastic.engines.model.whole_gradients import WholeGradients

# As of `TPLayerSpec.grad_allreduce` (deepspeed/module_inject/autotp_config.py).
_ADDED_UP = (
    "let AutoTP add them up (in tensor_parallel.partition_config a layer_spec of partition_type skip with "
    "grad_allreduce: true)"
)


class DeepSpeedAdapter:
    """Implements `elastic.engines.base.Engine`."""

    name = "deepspeed"
    # By `forward` alone.
    _calls_module = True

    def __init__(
        self,
        native: Any,
        nonfinite: str | None = None,
        belongings: Belongings | None = None,
        cuts: Cuts | None = None,
    ) -> None:
        """`cuts`: where ranks share layers; None: nobody has looked. Raises UsageError where `nonfinite` is "skip" and
        the configuration does not allow it."""
        self.native = native
        self._cuts = cuts
        self._belongings = belongings
        self.module: torch.nn.Module = native.module
        self.device: torch.device = torch.device(native.device)
        self.data_group: dist.ProcessGroup = native.seq_data_parallel_group
        self._nonfinite = None if nonfinite is None else NonFinite(native, nonfinite)
        self.judged = self._nonfinite is None or self._nonfinite.judged
        # Stage 3 gathers weights within the forward pass; tokens go to the ranks that have their experts.
        self._gathers = native.zero_optimization_partition_weights() or native.has_moe_layers
        self._hooks_called = self._calls_module and not self._gathers and _take_hooks(native)
        # Also what slices of layers give is added up over ranks.
        self._needs_others = self._gathers or native.autotp_size() > 1
        self._output = LastOutput.of(self.module)
        self.ledger = CollectiveLedger(self.device, {self.data_group: "dp"})
        self._whole_gradients: WholeGradients | None = None
        if native.autotp_size() > 1:
            cell = native.mpu.get_tensor_model_parallel_group()
            self.ledger.name_axis(cell, "tp")
            self._whole_gradients = WholeGradients(cell, self.device, _ADDED_UP)
        if native.zero_hpz_partition_size() > 1:
            self.ledger.name_axis(_group_of_copies(), "hpz")
        for group in native.expert_parallel_group.values():
            self.ledger.name_axis(group, "ep")
        self._kept_sums = KeptSums(native)
        self.sums: GradientSums | str = gradient_sums(native, self._kept_sums)
        self._counted = CountedBackend()
        self._last, self._has_pass = True, False
        self._rate_factor: Callable[[], float] = lambda: 1.0
        # What the ledger showed at the first forward pass of the step; None between two steps.
        self._began_s: float | None = None

    def count_collectives(self) -> None:
        """From here on outcomes have `collectives` and, on the CPU, `collective_s`."""
        self._counted.install(self.ledger)

    def forward(self, inputs: Sequence[Any], named: Mapping[str, Any], last: bool | None) -> Any:
        self._has_pass = True
        if last is not None:
            self.ends_step(last)
        if self._hooks_called:
            self.native._forward_prologue(inputs, named)
        try:
            output = self.native(*inputs, **named)
        except Exception as error:
            if self._whole_gradients is not None:
                explain(error, self.native.autotp_size())
            raise
        if self._hooks_called:
            self.native._forward_epilogue()
        return self._output.seen(output, self.module.training) if self._needs_others else output

    def ends_step(self, last: bool) -> None:
        if self.native.zero_optimization_partition_weights() and not self._has_pass:
            raise UsageError(
                "engine.backward(loss) came without a pass of the engine: with ZeRO stage 3 call engine(batch), not "
                "the model itself, whose gradients would be others"
            )
        # Set by hand for every micro-batch: the last step of a run may have fewer than DeepSpeed was told.
        self.native.set_gradient_accumulation_boundary(last)
        self._last = last
        if self._began_s is None:
            self._began_s = self.ledger.waited_s

    def forward_alone(self, inputs: Sequence[Any], named: Mapping[str, Any]) -> Any:
        if not self._needs_others:
            # Without the engine, which would prepare a backward pass.
            return self.module(*inputs, **named)
        return self._output.zeros()

    def gathered(self) -> AbstractContextManager[None]:
        if self.native.zero_optimization_partition_weights():
            return fetched_at_once(self.native.optimizer.parameter_offload)
        return nullcontext()

    def precision(self) -> Precision | None:
        native = self.native
        if native.has_moe_layers or self._whole_gradients is not None:
            return None
        found = Precision.of(self.module, native.torch_autocast_dtype() if native.torch_autocast_enabled() else None)
        return replace(found, by_engine=self._gathers)

    def backward(self, loss: torch.Tensor, named: Mapping[str, Any]) -> Any:
        self._has_pass = False
        if (changed := self._kept_sums.restore()) is not None:
            raise UsageError(f"the gradients of this step's earlier micro-batches were {changed}")
        whole = self._whole_gradients
        if whole is None or whole.compared:
            result = self.native.backward(loss, **named)
        else:
            with whole.compare({name: leaf for name, leaf in self.leaves().items() if is_repeated(leaf)}):
                result = self.native.backward(loss, **named)
        self._kept_sums.note(self._last)
        return result

    def scale_rates(self, factor: Callable[[], float]) -> None:
        native, take = self.native, self.native._take_model_step
        self._rate_factor = factor

        def taking(*args: Any, **kwargs: Any) -> Any:
            optimizer = native.optimizer
            update = optimizer.step

            def update_scaled(*inputs: Any, **named: Any) -> Any:
                # Around the update alone: schedulers go on from the rates that are theirs.
                with scaled_rates(optimizer.param_groups, factor()):
                    return update(*inputs, **named)

            with updating(optimizer, update_scaled):
                return take(*args, **kwargs)

        native._take_model_step = taking

    def clip(self, largest: float) -> None:
        if largest and not self._has_norm():
            raise UsageError(
                f"gradients cannot be clipped to {largest}: with compute_grad_norm: false, and in stage 0 where ranks "
                "share layers or experts, DeepSpeed has no norm of the whole gradient; use another ZeRO stage"
            )
        # The engine's in stage 0 with fp32; of the others each optimizer has been given its own.
        self.native._config.gradient_clipping = largest
        if hasattr(self.native.optimizer, "clip_grad"):
            self.native.optimizer.clip_grad = largest

    def step(self, inputs: Sequence[Any], named: Mapping[str, Any], consumed: int) -> StepOutcome | None:
        if not self._last:
            self.native.step(*inputs, **named)
            return None
        # DeepSpeed adds its nominal batch, which counts padding, and its monitors write at the sum.
        self.native.global_samples = consumed - self.native.train_batch_size()
        if self._nonfinite is None:
            self.native.step(*inputs, **named)
            norm = self.native.get_global_grad_norm()
        else:
            with self._nonfinite.stepping():
                self.native.step(*inputs, **named)
            norm = self._nonfinite.grad_norm
        self.native.global_samples = consumed
        began_s, self._began_s = self._began_s, None
        return self._outcome(norm, began_s)

    def _has_norm(self) -> bool:
        native = self.native
        shared = native.autotp_size() > 1 or native.has_moe_layers
        return bool(native.zero_compute_grad_norm() and not (shared and native.zero_optimization_stage() == 0))

    def _outcome(self, norm: float | torch.Tensor | None, began_s: float | None) -> StepOutcome:
        """Of the step just made; `began_s`: what the ledger showed when it began."""
        return StepOutcome(
            applied=bool(self.native.was_step_applied()),
            grad_norm=norm,
            learning_rates=tuple(rate * self._rate_factor() for rate in _learning_rates(self.native.optimizer)),
            loss_scale=None if self._nonfinite is None else self._nonfinite.loss_scale(),
            collective_s=None if began_s is None or self.ledger.on_device else self.ledger.waited_s - began_s,
            collectives=self.ledger.take(),
        )

    def leaves(self) -> dict[str, torch.Tensor]:
        return {name: leaf for name, leaf in self.module.named_parameters() if leaf.requires_grad}

    def state(self) -> ZeroState:
        state = open_zero_state(self.native)
        state.cuts = self._cuts
        # A scheduler that cannot be carried is refused now, not at the first snapshot.
        self.extra_state()
        return state

    def extra_state(self) -> dict[str, Json]:
        return extra_state.read(self.native)

    def fragments(self, names: Collection[str] | None = None) -> Iterator[Fragment]:
        return fragments(self.native, names)

    def wrong_numbers(self, saved: Mapping[str, Json], names: Collection[str] | None = None) -> list[str]:
        return wrong_numbers(self.native, saved, names)

    def expected_extra_state(self, saved: Mapping[str, Json]) -> dict[str, Json]:
        return expected_numbers(self.native, saved)

    def load_extra_state(self, saved: Mapping[str, Json]) -> None:
        extra_state.install(self.native, saved)

    def obstacle(self) -> str | None:
        if self._belongings is None or self.native is None:
            return "this engine does not know what it was built on"
        return self._belongings.obstacle(self.native)

    def detach(self) -> None:
        native, belongings = self.native, self._belongings
        self.close()
        if native is not None and belongings is not None:
            hollow_out(native)
            belongings.give_back()

    def close(self) -> None:
        native, self.native, self._belongings = self.native, None, None
        if native is not None:
            replaced = native.autotp_size() > 1 or native.has_moe_layers
            release(native)
            self._kept_sums.release()
            release_engine(native)
            if replaced and compiles():
                forget_graphs()
        # Before the groups are destroyed: DeepSpeed does so through the object that the proxy stands in for.
        self._counted.remove()
        self.ledger.close()
        self._nonfinite = self._whole_gradients = None
        self.sums = "the engine is closed"
        self._output.forget()
        self.module = torch.nn.Identity()


def _learning_rates(optimizer: Any) -> tuple[float, ...]:
    groups = getattr(optimizer, "param_groups", None) or []
    return tuple(float(group["lr"]) for group in groups if "lr" in group)


def _group_of_copies() -> Any:
    """The ranks that have hpZ's copy of the weights between them."""
    from deepspeed.utils import groups

    return groups._get_zero_param_intra_parallel_group()


def _take_hooks(native: Any) -> bool:
    """Whether `_forward_prologue` and `_forward_epilogue` are to be called around a forward pass.

    DeepSpeed has hooks on the model for it. Of a model that is compiled in place torch traces them, too, in the first
    pass of each engine, which takes ten times as long as the pass; without hooks the model alone is compiled,
    and a worker that joins has done so before. They stay where they matter to who calls the model itself: inputs are
    cast in them, at stage 3 weights are watched.
    """
    hooks = (native.module_forward_pre_hook, native.module_forward_post_hook)
    if native.fp16_auto_cast() or None in hooks:
        return False
    for hook in hooks:
        hook.remove()
    native.module_forward_pre_hook = native.module_forward_post_hook = None
    return True
