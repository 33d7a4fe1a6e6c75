"""Where DeepSpeed 0.19.8 adds up a rank's gradients within a step, before any of them is reduced.

Stage 0, and stage 1 without `overlap_comm`: in `parameter.grad`, in the parameter's dtype, up to the end of the last
micro-batch's backward, whose epilogue calls `allreduce_gradients`. Stage 1 in bf16 with fp32 accumulation
(BF16_Optimizer): in its flat fp32 buffers, likewise. The reduction then works in place, bucket by bucket: from its
beginning on the sums are gone. `contiguous_gradients` and `round_robin_gradients` matter within the reduction only.

Stages 2 and 3 reduce in every backward, to parts that lie on other ranks.

Reduced by somebody else, the sums are means already when DeepSpeed gets them: it then divides by nothing, and its
reductions leave them as they are. Stage 1 still cuts them into its partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from elastic.core.errors import UsageError
from elastic.engines.base import GradientSums
from elastic.engines.deepspeed.collectives import muted
from elastic.engines.model.update_rates import updating

if TYPE_CHECKING:
    from elastic.comm.strategies.bounded_staleness import Rates, Updates


class KeptSums:
    """`zero_grad()` of the script within a step, as loops of torch's call it before every backward pass, does nothing:
    how many micro-batches a rank has in a step is a matter of the world size, and the step itself clears their sums.

    `restore` before each backward pass, `note` after it.
    """

    def __init__(self, native: Any) -> None:
        self._native: Any = native
        self._grads: list[tuple[torch.nn.Parameter, torch.Tensor, int]] = []
        self._under_way = False
        self._clear: Callable[..., None] = lambda *args, **kwargs: None
        if (optimizer := native.optimizer) is not None:
            self._clear, optimizer.zero_grad = optimizer.zero_grad, self._zero_grad

    def note(self, last: bool) -> None:
        """A micro-batch has been added. `last`: the optimizer's step follows."""
        self._under_way, self._grads = not last, []
        if not last:
            trained = ((parameter, parameter.grad) for parameter in self._native.module.parameters())
            self._grads = [(parameter, grad, grad._version) for parameter, grad in trained if grad is not None]

    def restore(self) -> str | None:
        """Put back what the model's `zero_grad` has dropped. What must not be done to the rest in place, and was, with
        what to write; None where nothing was."""
        grads, self._grads = self._grads, []
        for parameter, grad, _ in grads:
            parameter.grad = grad if parameter.grad is None else parameter.grad
        touched = any(grad._version != version for _, grad, version in grads)
        if not touched:
            return None
        if any(bool(grad.count_nonzero()) for _, grad, _ in grads):
            # Each rank would clip its own sums, as often as it has micro-batches.
            return (
                "changed in place: remove clip_grad_norm_() and the like from the loop, and give gradient_clipping in "
                "the configuration, which clips the whole gradient once"
            )
        return "zeroed in place: remove zero_grad() from the loop, engine.step() clears them when the step is made"

    def release(self) -> None:
        if self._native.optimizer is not None:
            vars(self._native.optimizer).pop("zero_grad", None)
        self._native, self._grads = None, []
        self._clear = lambda *args, **kwargs: None

    def _zero_grad(self, *args: Any, **kwargs: Any) -> None:
        if not self._under_way:
            self._clear(*args, **kwargs)


def gradient_sums(native: Any, kept: KeptSums) -> GradientSums | str:
    """The sums of this engine, or why they do not outlive it, as a part of a sentence."""
    stage = int(native.zero_optimization_stage())
    refused = {
        f"in stage {stage} partial sums lie on other ranks": stage > 1,
        "with tensor parallelism the ranks of a cell hold parts of them": native.autotp_size() > 1,
        "with expert parallelism those of experts are of other ranks' samples": native.has_moe_layers,
        "fp16 scales them by a loss scale that may change": native.fp16_enabled(),
        "torch_autocast may scale them": native.torch_autocast_enabled(),
        "with offload_optimizer they are kept elsewhere": native.zero_offload_optimizer() is not None,
        "with overlap_comm they are reduced within the last backward pass": stage == 1 and native.zero_overlap_comm(),
    }
    why = next((why for why, so in refused.items() if so), None)
    if why is not None:
        return why
    kind = type(native.optimizer).__name__
    if kind == "BF16_Optimizer":
        return _InBuffers(native, kept)
    if getattr(native.optimizer, "use_grad_accum_attribute", False):
        return "they are added up in another dtype than the parameters'"
    return _InParameters(native, kept)


def release(native: Any) -> None:
    """Before the engine is closed: it must not refer to itself."""
    for name in ("allreduce_gradients", "step", "_take_model_step", "clip_fp32_gradients"):
        vars(native).pop(name, None)


class _Sums:
    def __init__(self, native: Any, kept: KeptSums) -> None:
        self._native: Any = native
        self._kept = kept

    def before_reduction(self, call: Callable[[], None]) -> None:
        native = self._native
        reduce = native.allreduce_gradients

        def allreduce_gradients(*args: Any, **kwargs: Any) -> Any:
            if native.is_gradient_accumulation_boundary():
                call()
            return reduce(*args, **kwargs)

        native.allreduce_gradients = allreduce_gradients

    def reduce_by(self, reduce: Callable[[Mapping[str, torch.Tensor]], None]) -> None:
        native = self._native
        _require_one_reduction(native)
        cut = native.allreduce_gradients

        def allreduce_gradients(*args: Any, **kwargs: Any) -> Any:
            if not native.is_gradient_accumulation_boundary():
                return cut(*args, **kwargs)
            reduce(self._whole())
            with muted(), _undivided(native), _undivided(native.optimizer):
                return cut(*args, **kwargs)

        native.allreduce_gradients = allreduce_gradients
        if not native.zero_optimization():
            native.clip_fp32_gradients = self._clip

    def _clip(self) -> None:
        """By the norm of the reduced gradient, of which each rank has the whole. DeepSpeed's own takes the mean of it
        over all ranks, and so would wait for them in every step, and mix the norms of islands."""
        torch.nn.utils.clip_grad_norm_(self._native.module.parameters(), self._native.gradient_clipping())

    def after_update(self, call: Callable[[], None]) -> None:
        native = self._native
        step = native.step

        def stepping(*args: Any, **kwargs: Any) -> Any:
            done = native.is_gradient_accumulation_boundary()
            found = step(*args, **kwargs)
            if done:
                call()
            return found

        native.step = stepping

    def updates_by(self, update: Callable[[Callable[[], object]], None], clips: bool = True) -> Updates:
        native = self._native
        if native.zero_optimization() or native.bfloat16_enabled():
            raise UsageError("communication.semantics: async is supported in ZeRO stage 0 and fp32")
        made, step = _Updates(native), native.step
        if not clips:
            native.clip_fp32_gradients = lambda: None

        def stepping(*args: Any, **kwargs: Any) -> Any:
            if not native.is_gradient_accumulation_boundary():
                return step(*args, **kwargs)
            optimizer = native.optimizer
            with updating(optimizer, partial(update, optimizer.step)):
                return step(*args, **kwargs)

        native.step = stepping
        return made

    def _whole(self) -> dict[str, torch.Tensor]:
        """The sums of every trained parameter, zeros where it took no part: the same names on every rank."""
        raise NotImplementedError(f"{type(self).__name__} does not say where the sums of its engine are")


def _require_one_reduction(native: Any) -> None:
    if native.has_moe_layers:
        raise UsageError("communication: the gradients of expert layers travel within their own groups; leave it out")
    config = native._config
    if config.communication_data_type is not None and str(config.communication_data_type) != str(
        native.get_data_types()[0]
    ):
        raise UsageError(
            "communication and communication_data_type of the DeepSpeed configuration both say how gradients travel; "
            "remove one of them"
        )


class _Updates:
    """Implements `elastic.comm.strategies.bounded_staleness.Updates` for an optimizer of torch."""

    def __init__(self, native: Any) -> None:
        # Before a step that is skipped puts something else there.
        self._native, self._step = native, native.optimizer.step

    def rates(self) -> list[dict[str, Any]]:
        return [
            {name: value for name, value in group.items() if name != "params"}
            for group in self._native.optimizer.param_groups
        ]

    @contextmanager
    def at(self, rates: Rates) -> Iterator[None]:
        groups, before = self._native.optimizer.param_groups, self.rates()
        for group, rate in zip(groups, rates, strict=True):
            group.update(rate)
        try:
            yield
        finally:
            for group, rate in zip(groups, before, strict=True):
                group.update(rate)

    def make(self, gradient: Mapping[str, torch.Tensor], rates: Rates) -> None:
        native = self._native
        parameters = dict(native.module.named_parameters())
        before = {name: parameter.grad for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            parameter.grad = gradient.get(name)
        if native.gradient_clipping() > 0.0:
            native.clip_fp32_gradients()
        with self.at(rates):
            self._step()
        for name, parameter in parameters.items():
            parameter.grad = before[name]


@contextmanager
def _undivided(holder: Any) -> Iterator[None]:
    before = getattr(holder, "gradient_average", None)
    if before is not None:
        holder.gradient_average = False
    try:
        yield
    finally:
        if before is not None:
            holder.gradient_average = before


class _InParameters(_Sums):
    """Implements `elastic.engines.base.GradientSums`."""

    def take(self) -> dict[str, torch.Tensor]:
        if self._kept.restore() is not None:
            raise ValueError("the script has changed them")
        found = {}
        for name, parameter in self._native.module.named_parameters():
            if parameter.grad is not None:
                if parameter.grad.is_sparse:
                    raise ValueError(f"the gradient of {name!r} is sparse")
                found[name], parameter.grad = parameter.grad, None
        return found

    def add(self, sums: Mapping[str, torch.Tensor]) -> None:
        parameters = dict(self._native.module.named_parameters())
        for name, value in sums.items():
            grad = parameters[name].grad
            parameters[name].grad = value if grad is None else grad.add_(value)

    def _whole(self) -> dict[str, torch.Tensor]:
        found = {}
        for name, parameter in self._native.module.named_parameters():
            if not parameter.requires_grad or not parameter.numel():
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad.is_sparse:
                raise UsageError(
                    f"communication: the gradient of {name!r} is sparse (an embedding made with sparse=True) and fits "
                    "into no bucket; make it without, or leave communication out"
                )
            found[name] = parameter.grad
        return found


class _InBuffers(_Sums):
    """Implements `elastic.engines.base.GradientSums`."""

    def take(self) -> dict[str, torch.Tensor]:
        optimizer = self._native.optimizer
        found = {name: buffer for name, (group, number), buffer in self._buffers() if self._has(group)[number]}
        # Its zero_grad clears them in place.
        optimizer.fp32_groups_gradients_flat = []
        for flags in optimizer.fp32_groups_has_gradients:
            flags[:] = [False] * len(flags)
        return found

    def add(self, sums: Mapping[str, torch.Tensor]) -> None:
        for name, (group, number), buffer in self._buffers():
            if name in sums:
                buffer.add_(sums[name])
                self._has(group)[number] = True

    def _whole(self) -> dict[str, torch.Tensor]:
        return {name: buffer for name, _, buffer in self._buffers()}

    def _has(self, group: int) -> list[bool]:
        """Without gradients a buffer takes no part in the norm."""
        flags: list[bool] = self._native.optimizer.fp32_groups_has_gradients[group]
        return flags

    def _buffers(self) -> Iterator[tuple[str, tuple[int, int], torch.Tensor]]:
        optimizer = self._native.optimizer
        for group, parameters in enumerate(optimizer.bf16_groups):
            for number, parameter in enumerate(parameters):
                yield optimizer.param_names[parameter], (group, number), optimizer.fp32_groups_gradients[group][number]
