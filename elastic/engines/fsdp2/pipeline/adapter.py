"""`Engine` over a rank's stages of a pipeline under `fully_shard`: a step is one call, in which torch's schedule orders
the passes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from elastic.core.errors import UsageError
from elastic.engines.base import MicroStep, ResolvedConfig, StepOutcome
from elastic.engines.fsdp2.adapter import Fsdp2Adapter, Fsdp2Engine
from elastic.engines.fsdp2.belongings import Belongings
from elastic.engines.fsdp2.config import WEIGHTS_LATER
from elastic.engines.fsdp2.gradients import shard_of
from elastic.engines.fsdp2.meshes import Meshes, is_over_cell
from elastic.engines.fsdp2.pipeline.layers import Chain, Cut, layers_by_name
from elastic.engines.fsdp2.pipeline.own_forward import OwnForward
from elastic.engines.fsdp2.pipeline.passes import Arguments, Pass
from elastic.engines.fsdp2.pipeline.schedules import Schedules
from elastic.engines.fsdp2.pipeline.stage import Stage
from elastic.engines.fsdp2.pipeline.tied import Groups, TiedGradients
from elastic.engines.fsdp2.state import Fsdp2State
from elastic.engines.model.pipeline import Pipeline
from elastic.engines.model.plain_names import named_parameters


class PipelineEngine(Fsdp2Engine):
    """What users reach through `engine.<attribute>`."""

    evaluate: Callable[[Iterator[Any], int], torch.Tensor]

    def eval_batch(self, data_iter: Any, num_micro_batches: int | None = None) -> torch.Tensor:
        """The mean loss of so many micro-batches (None: as many as a rank's share of a step) and of all pipelines,
        without gradients and dropout; the same on all ranks, by all of which it is called.

        `data_iter` gives pairs (inputs, labels), the same ones on all ranks of a pipeline."""
        return self.evaluate(iter(data_iter), num_micro_batches or self._resolved.micro_steps)


class PipelineAdapter(Fsdp2Adapter):
    """Implements `elastic.engines.base.Pipelined`."""

    def __init__(
        self,
        native: PipelineEngine,
        meshes: Meshes,
        device: torch.device,
        resolved: ResolvedConfig,
        withhold: bool,
        belongings: Belongings | str,
        cut: Cut,
        tied: Groups,
        pipeline: Pipeline,
    ) -> None:
        super().__init__(native, meshes, device, resolved, withhold, belongings)
        assert meshes.pp is not None
        self.sums = "in a pipeline a rank has those of its layers"
        self._cut, self._loss_fn = cut, pipeline.loss_fn
        # Not by assignment to the class: the model is the user's.
        self._before = vars(self.module).get("forward")
        self._chain: Any = (
            OwnForward(self.module, cut, device, self.module.forward, pipeline.loss_fn is None)
            if pipeline.own_forward
            else Chain(self.module, cut)
        )
        vars(self.module)["forward"] = self._chain
        self._tied = TiedGradients(self.module, cut, tied, device, self._all_reduce)
        name = resolved.native["pipeline_schedule"]
        self._stages = [
            Stage(self.module, stage, cut.holders, device, meshes.pp, self._enter, self._loss_of, name in WEIGHTS_LATER)
            for stage in cut.stages
        ]
        self._schedules: Any = Schedules(name, self._stages, self._scaled_loss)
        # Of the step under way, on the last stage.
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        native.evaluate = self._evaluate
        for group in (meshes.pp, *self._tied.groups):
            self.ledger.name_axis(group, "pp")
        self.ledger.remark = "; ".join(filter(None, (self.ledger.remark, _rounded(cut, resolved.native))))

    def train_batch(
        self, steps: Sequence[MicroStep], consumed: int, before_update: Callable[[], None]
    ) -> tuple[torch.Tensor, StepOutcome]:
        passes = [Pass(step.read, self.device, step) for step in steps]
        began, self._began_s = time.perf_counter(), self.ledger.waited_s
        self._loss = torch.zeros_like(self._loss)
        for stage in self._stages:
            stage.begin(passes, backward=True)
        try:
            self._schedules.run(passes)
            for stage in self._stages:
                stage.end()
        except RuntimeError as error:
            raise _cause(error) from None
        finally:
            self._chain.before = None
        if not self.ledger.on_device:
            # The rest was spent in waiting for other stages.
            computed_s = sum(stage.computed_s for stage in self._stages)
            self.ledger.waited_s += max(0.0, time.perf_counter() - began - computed_s)
        self._compare_whole()
        self._tied.add_up()
        before_update()
        loss = self._over_all(self._loss)
        return loss, self._update()

    def forward(self, inputs: Sequence[Any], named: Mapping[str, Any], last: bool | None) -> NoReturn:
        raise _one_call("forward")

    def forward_alone(self, inputs: Sequence[Any], named: Mapping[str, Any]) -> NoReturn:
        raise _one_call("forward")

    def backward(self, loss: torch.Tensor, named: Mapping[str, Any]) -> NoReturn:
        raise _one_call("backward")

    def step(self, inputs: Sequence[Any], named: Mapping[str, Any], consumed: int) -> NoReturn:
        raise _one_call("step")

    def state(self) -> Fsdp2State:
        state = super().state()
        state.layers = layers_by_name(self.module, self._cut.row)
        state.tied = tuple(sorted(self._cut.tied))
        state.elsewhere = frozenset(name for name, ranks in self._cut.tied.items() if ranks[0] != self._cut.rank)
        if self._cut.rank != self._cut.holders[0]:
            # All stages have these, and the first one's are saved.
            state.elsewhere |= frozenset(self._cut.outside)
        return state

    def close(self) -> None:
        native = self.native
        if native is not None:
            del native.evaluate
            vars(native.module).pop("forward", None)
            if self._before is not None:
                vars(native.module)["forward"] = self._before
        # They hold groups, and the graph of a step that has failed.
        self._stages, self._schedules, self._chain = [], None, None
        self._tied.close()
        super().close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _gradients(self) -> list[tuple[torch.Tensor, int]]:
        copies = self._tied.copies
        stepped = [p for group in self.native.optimizer.param_groups for p in group["params"] if p.grad is not None]
        return [
            (gradient, count * copies.get(id(parameter), 1))
            for parameter, (gradient, count) in zip(stepped, super()._gradients(), strict=True)
        ]

    def _compare_whole(self) -> None:
        """In the first step: of what each rank of a cell has whole, all have the same gradient."""
        whole = self._whole_gradients
        if whole is not None and not whole.compared:
            found = [(name, p.grad) for name, p in named_parameters(self.module) if not is_over_cell(p)]
            whole.look({name: shard_of(gradient) for name, gradient in found if gradient is not None})

    def _enter(self, stage: int, now: Pass, received: tuple[torch.Tensor, ...]) -> Arguments:
        self._chain.stage = stage
        self._chain.before = None if now.step is None else now.step.before_layer
        if now.step is not None:
            now.step.before_forward(self._chain.modules)
        arguments: Arguments = self._chain.given(now, received)
        return arguments

    def _loss_of(self, now: Pass, outputs: Any) -> Any:
        """The last stage's, of what the model gives."""
        return outputs if self._loss_fn is None else self._loss_fn(outputs, now.take_labels())

    def _scaled_loss(self, found: torch.Tensor, now: Pass) -> torch.Tensor:
        """The last stage's, of the micro-batch's mean loss."""
        assert now.step is not None
        # The last stage is its rank's last one.
        with self._stages[-1].computing():
            loss: torch.Tensor = now.step.scaled(found) / self._micro_steps
            self._loss += loss.detach().reshape(()).double()
        return loss

    def _over_all(self, loss: torch.Tensor) -> torch.Tensor:
        """The mean over the data-parallel ranks, of the last stages; the same on all ranks."""
        self._all_reduce(loss, group=dist.group.WORLD)
        # The ranks that share the last stage's layers have all of them the same loss.
        tp = 1 if self._meshes.tp is None else self._meshes.tp.size()
        mean: torch.Tensor = loss.float() / (self._meshes.dp.size() * tp)
        return mean

    def _evaluate(self, contents: Iterator[Any], count: int) -> torch.Tensor:
        module, training = self.module, self.module.training
        passes = [Pass(_reading(next(contents)), self.device) for _ in range(count)]
        self._require_as_many(count)
        total, sent = torch.zeros((), dtype=torch.float64, device=self.device), []
        outputs: Any = None
        for stage in self._stages:
            stage.begin(passes, backward=False)
        module.eval()
        try:
            with torch.no_grad():
                for number, stage in product(range(count), self._stages):
                    if stage.stage_index - 1 in self._cut.stages:
                        stage.set_local_fwd_input(outputs, number)
                    else:
                        _wait(_posted(stage.get_fwd_recv_ops(number)))
                    outputs = stage.forward_one_chunk(number)
                    if stage.stage_index + 1 not in self._cut.stages:
                        sent += _posted(stage.get_fwd_send_ops(number))
                    if stage.is_last:
                        total += outputs.detach().reshape(()).double() / count
            _wait(sent)
            for stage in self._stages:
                stage.end()
        except RuntimeError as error:
            raise _cause(error) from None
        finally:
            module.train(training)
        return self._over_all(total)

    def _require_as_many(self, passes: int) -> None:
        """Ranks that share experts meet in each pass, and a step has as many on all of them. Raises UsageError on all
        ranks where an evaluation has not."""
        if self._meshes.experts is None:
            return
        found = torch.tensor([passes, -passes], device=self.device)
        self._all_reduce(found, dist.ReduceOp.MAX, group=dist.group.WORLD)
        most, least = found.mul(torch.tensor([1, -1], device=self.device)).tolist()
        if most != least:
            raise UsageError(
                f"engine.eval_batch was called with {least} micro-batches on some ranks and with {most} on others; "
                "ranks that share experts (mesh.ep) compute equally many"
            )


def _rounded(cut: Cut, options: Mapping[str, Any]) -> str:
    """In words what became of a number of stages for which there are too few layers; "" where nothing did."""
    asked, ranks = options["pipeline_stages_per_rank"], len(set(cut.holders))
    if ranks == 1 or len(cut.stages) == asked:
        return ""
    return (
        f"{len(cut.stages)} {'stage' if len(cut.stages) == 1 else 'stages'} per rank: {ranks} ranks with {asked} each "
        f"need {ranks * asked} layers with trained parameters (fsdp2.pipeline_stages_per_rank)"
    )


def _reading(content: Any) -> Callable[[], Any]:
    return lambda: content


def _posted(operations: Sequence[dist.P2POp]) -> list[Any]:
    return dist.batch_isend_irecv(list(operations)) if operations else []


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


def _cause(error: RuntimeError) -> BaseException:
    """torch puts a sentence of its own before what a layer or a backward pass has raised."""
    said = str(error)
    if error.__cause__ is not None and ("failed to run forward" in said or "Failed to run stage backward" in said):
        return error.__cause__
    return error


def _one_call(call: str) -> UsageError:
    return UsageError(f"engine.{call} does not exist for a pipeline: engine.train_batch is a whole step")
