"""`Engine` over one PipelineEngine: a step is one call, in which DeepSpeed's schedule orders the passes.

DeepSpeed executes a schedule by a table from instructions to methods (runtime/pipe/engine.py, `_INSTRUCTION_MAP`). The
engine is given a table of its own, so that each pass is known: which micro-batch it is of, and when weights change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch

from elastic.core.errors import UsageError
from elastic.engines.base import MicroStep, StepOutcome
from elastic.engines.deepspeed.adapter import DeepSpeedAdapter
from elastic.engines.deepspeed.belongings import Belongings
from elastic.engines.deepspeed.pipeline import placed
from elastic.engines.deepspeed.pipeline.module import LayerSeeds


class PipelineAdapter(DeepSpeedAdapter):
    """Implements `elastic.engines.base.Pipelined`."""

    # DeepSpeed does, in `train_batch`.
    _calls_module = False

    def __init__(self, native: Any, nonfinite: str | None = None, belongings: Belongings | None = None) -> None:
        super().__init__(native, nonfinite, belongings)
        self.ledger.name_axis(native.grid.get_pipe_parallel_group(), "pp")
        self.sums = "in a pipeline a rank has those of its layers"
        self._seeds: LayerSeeds = native.module.seed_fn
        self._seeds.built = True
        self._loss_fn: Callable[..., Any] = native.module.loss_fn
        # Not by assignment: a loss that is a module is kept among the modules.
        vars(native.module)["loss_fn"] = self._scaled_loss
        # Of the step under way: its micro-batches, how many were read and passed forward, which is in which buffer.
        self._steps: Sequence[MicroStep] = ()
        self._read = self._passed = 0
        self._in_buffer: dict[int, MicroStep] = {}
        self._current: MicroStep | None = None
        self._before_update: Callable[[], None] = _nothing
        self._instruct(native)
        self._evaluate: Callable[..., Any] = native.eval_batch
        native.eval_batch = self._eval_batch

    def train_batch(
        self, steps: Sequence[MicroStep], consumed: int, before_update: Callable[[], None]
    ) -> tuple[torch.Tensor, StepOutcome]:
        native = self.native
        self._steps, self._before_update = steps, before_update
        self._read = self._passed = 0
        # The last step of a run may have fewer than DeepSpeed was told.
        native.micro_batches = len(steps)
        native.global_samples = consumed - native.train_batch_size()
        began_s = self.ledger.waited_s
        try:
            loss = native.train_batch(self._contents())
        finally:
            self._steps, self._before_update = (), _nothing
            self._in_buffer.clear()
            self._seeds.before_layer = self._current = None
            native.data_iterator = None
        native.global_samples = consumed
        norm = native.get_global_grad_norm() if self._nonfinite is None else self._nonfinite.grad_norm
        return loss, self._outcome(norm, began_s)

    def forward(self, inputs: Sequence[Any], named: Mapping[str, Any], last: bool | None) -> NoReturn:
        raise _one_call("forward")

    def forward_alone(self, inputs: Sequence[Any], named: Mapping[str, Any]) -> NoReturn:
        raise _one_call("forward")

    def backward(self, loss: torch.Tensor, named: Mapping[str, Any]) -> NoReturn:
        raise _one_call("backward")

    def step(self, inputs: Sequence[Any], named: Mapping[str, Any], consumed: int) -> NoReturn:
        raise _one_call("step")

    def obstacle(self) -> str | None:
        return super().obstacle() or placed.obstacle(self.native.module)

    def detach(self) -> None:
        native = self.native
        model = None if native is None else native.module
        super().detach()
        if model is not None:
            placed.release(model)

    def close(self) -> None:
        native = self.native
        if native is not None:
            del vars(native.module)["loss_fn"]
            if not isinstance(self._loss_fn, torch.nn.Module):
                native.module.loss_fn = self._loss_fn
            self._seeds.before_layer = None
            del self._evaluate
            _release(native)
        super().close()
        _forget_grid()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _instruct(self, native: Any) -> None:
        from deepspeed.runtime.pipe import schedule

        table = dict(native._INSTRUCTION_MAP)
        forward, backward, update = (
            table[kind] for kind in (schedule.ForwardPass, schedule.BackwardPass, schedule.OptimizerStep)
        )

        def forward_pass(engine: Any, buffer_id: int) -> None:
            if self._steps:
                self._in_buffer[buffer_id] = self._steps[self._passed]
                self._passed += 1
                self._enter(self._in_buffer[buffer_id])
                self._in_buffer[buffer_id].before_forward((engine.module,))
            forward(engine, buffer_id=buffer_id)

        def backward_pass(engine: Any, buffer_id: int) -> None:
            # It may compute the forward pass again, with the same random numbers.
            self._enter(self._in_buffer[buffer_id])
            backward(engine, buffer_id=buffer_id)

        def optimizer_step(engine: Any) -> None:
            self._before_update()
            if self._nonfinite is None:
                update(engine)
            else:
                with self._nonfinite.stepping():
                    update(engine)

        table |= {
            schedule.ForwardPass: forward_pass,
            schedule.BackwardPass: backward_pass,
            schedule.OptimizerStep: optimizer_step,
        }
        native._INSTRUCTION_MAP = table

    def _eval_batch(self, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's. Its micro-batches may be of another size than those of training, for which stages keep buffers:
        one that is too small would end the process."""
        native = self.native
        native.reset_activation_shape()
        try:
            return self._evaluate(*args, **kwargs)
        finally:
            # Also where the script's data has ended in it, and the run goes on.
            native.reset_activation_shape()

    def _enter(self, step: MicroStep) -> None:
        self._current, self._seeds.before_layer = step, step.before_layer

    def _contents(self) -> Iterator[Any]:
        for step in self._steps:
            content = step.read()
            if not isinstance(content, (tuple, list)) or len(content) != 2:
                raise UsageError(
                    f"a pipeline's batches are pairs (inputs, labels), this one is a {type(content).__name__}: give "
                    "a dataset of pairs, or a collate_fn"
                )
            yield content

    def _scaled_loss(self, outputs: Any, labels: Any) -> Any:
        """The last stage's: outside of a step, in an evaluation, it is the user's own."""
        loss = self._loss_fn(outputs, labels)
        return loss if self._current is None else self._current.scaled(loss)


def _release(native: Any) -> None:
    """The graph of a loss or an activation that the engine holds refers to the engine through hooks, out of sight of
    the garbage collector (measured: 17 threads and 38 descriptors per generation)."""
    native.loss = native.total_loss = native.outputs = native.dp_group_loss = None
    native.agg_loss = native.agg_train_loss = None
    native.fwd_outputs = []
    for buffers in native.pipe_buffers.values():
        buffers.clear()
    native.num_pipe_buffers = 0
    native.pipe_recv_buf = native.grad_layer = native.data_iterator = None
    vars(native).pop("_INSTRUCTION_MAP", None)
    # The method of the last instruction, bound to the engine, and the evaluation, which holds it.
    vars(native).pop("_exec_instr", None)
    vars(native).pop("eval_batch", None)


def _forget_grid() -> None:
    from deepspeed.runtime.pipe import p2p

    p2p._grid = p2p._groups = None


def _one_call(call: str) -> UsageError:
    return UsageError(f"engine.{call} does not exist for a PipelineModule: engine.train_batch is a whole step")


def _nothing() -> None:
    return None
