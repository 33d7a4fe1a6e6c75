"""One stage of a pipeline: torch's `PipelineStage` (torch/distributed/pipelining/stage.py, release 2.13) that is told
the shapes of what it receives.

torch finds the shapes by a forward pass of its own through all stages, which would change buffers, and takes them for
those of every micro-batch, of which the last of a run may have fewer samples. Here the stage before tells them, once
for each number of samples, and tensors are received into memory of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from elastic.core.errors import UsageError
from elastic.engines.fsdp2.pipeline.passes import Arguments, Pass

# Of a message that tells shapes: as many tensors as a stage may give, each with as many dimensions.
_TENSORS, _DIMS = 16, 8
_DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """Of one tensor that travels forward. `trained`: its gradient travels back."""

    dtype: torch.dtype
    trained: bool
    size: tuple[int, ...]


class Stage(PipelineStage):
    """`module` is that of all of the rank's stages, and computes this one's pass once `entering` was called with its
    number, a micro-batch, and what the stage before has sent; it gives what to call the module with. What the module
    gives the last stage, `loss_of` gets with the micro-batch. `holders`: the rank of `group` that has each stage.
    `weights_later`: of a schedule that computes their gradients later than those of inputs. `passes` are the
    micro-batches at hand. `computed_s` are the seconds of the thread that went into passes since `begin`."""

    def __init__(
        self,
        module: torch.nn.Module,
        index: int,
        holders: Sequence[int],
        device: torch.device,
        group: dist.ProcessGroup,
        entering: Callable[[int, Pass, tuple[torch.Tensor, ...]], Arguments],
        loss_of: Callable[[Pass, Any], Any],
        weights_later: bool = False,
    ) -> None:
        super().__init__(module, index, len(holders), device, group=group)
        self.stage_index_to_group_rank = dict(enumerate(holders))
        self.passes: Sequence[Pass] = ()
        self.computed_s = 0.0
        self._entering, self._loss_of, self._weights_later = entering, loss_of, weights_later
        # What comes in and goes out, by number of samples; and of the micro-batches under way.
        self._incoming: dict[int, tuple[Shape, ...]] = {}
        self._outgoing: dict[int, tuple[Shape, ...]] = {}
        self._shapes: dict[int, tuple[Shape, ...]] = {}
        self._activations: dict[int, tuple[torch.Tensor, ...]] = {}
        self._gradients: dict[int, tuple[torch.Tensor | None, ...]] = {}
        self._telling: list[tuple[torch.Tensor, dist.Work]] = []

    def begin(self, passes: Sequence[Pass], backward: bool) -> None:
        """Before a step, or an evaluation."""
        self.clear_runtime_states()
        self.computed_s = 0.0
        self.passes, self.chunks, self.has_backward = passes, len(passes), backward

    def end(self) -> None:
        """After it, when all that was sent is received."""
        for _, work in self._telling:
            work.wait()
        for held in (self._telling, self._shapes, self._activations, self._gradients, self.bwd_cache):
            held.clear()
        self.passes = ()
        self.clear_runtime_states()

    @contextmanager
    def computing(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.computed_s += time.perf_counter() - began

    # -- what torch asks -----------------------------------------------------------------------------------------------

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> None:
        # What torch would look at, where a rank has several stages, to find that they only send to neighbours.
        self.args_recv_info, self.act_send_info = {0: ()}, {}

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> None:
        return None

    def _post_metadata_inference_cleanup(self) -> None:
        return None

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        shapes = self._shapes[fwd_chunk_id] = self._told(self.passes[fwd_chunk_id].samples)
        buffers = tuple(torch.empty(shape.size, dtype=shape.dtype, device=self.device) for shape in shapes)
        self._activations[fwd_chunk_id] = buffers
        return [self._operation(dist.irecv, buffer, self.stage_index - 1) for buffer in buffers]

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[torch.Tensor, ...]:
        received = self._activations.pop(fwd_chunk_id)
        shapes = self._shapes[fwd_chunk_id]
        return tuple(
            tensor.requires_grad_(shape.trained and self.has_backward)
            for tensor, shape in zip(received, shapes, strict=True)
        )

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        with self.computing():
            self._now = self.passes[fwd_chunk_id]
            return super().forward_one_chunk(fwd_chunk_id, (), save_forward_output=False)

    def forward_maybe_with_nosync(self, *received: Any, **_: Any) -> Any:
        inputs, named = self._entering(self.stage_index, self._now, received)
        output = super().forward_maybe_with_nosync(*inputs, **named)  # type: ignore[no-untyped-call]
        if self.is_last:
            # Here, since torch takes what a stage gives for tensors.
            output = self._loss_of(self._now, output)
        # torch detaches in place what it has the gradients of inputs of, and a view does not let it.
        return tree_map_only(torch.Tensor, _no_view, output) if self._weights_later else output

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        outputs = cast("tuple[torch.Tensor, ...]", self.fwd_cache[fwd_chunk_id][0])
        self._tell(self.passes[fwd_chunk_id].samples, self._described(outputs))
        return [
            self._operation(dist.isend, _there(tensor.detach()).contiguous(), self.stage_index + 1)
            for tensor in outputs
        ]

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        outputs = cast("tuple[torch.Tensor, ...]", self.fwd_cache[bwd_chunk_id][0])
        buffers = tuple(
            torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device) if tensor.requires_grad else None
            for tensor in outputs
        )
        self._gradients[bwd_chunk_id] = buffers
        return [self._operation(dist.irecv, each, self.stage_index + 1) for each in buffers if each is not None]

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[torch.Tensor | None, ...]:
        return self._gradients.pop(bwd_chunk_id)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        # So many of the pass's inputs are the stage before's.
        self._stage_meta.inputs = cast("Any", self._shapes.get(bwd_chunk_id, ()))
        with self.computing():
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self.computing():
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        with self.computing():
            super().perform_reduce_grad(grad_scale_factor)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first:
            self.bwd_cache.pop(bwd_chunk_id)
            return []
        return [
            self._operation(dist.isend, gradient.contiguous(), self.stage_index - 1)
            for gradient in self.get_local_bwd_output(bwd_chunk_id)
            if gradient is not None
        ]

    # -- between neighbouring stages of one rank -----------------------------------------------------------------------

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        many = isinstance(prev_stage_outputs, (tuple, list))
        outputs = tuple(prev_stage_outputs) if many else (prev_stage_outputs,)
        self._shapes[mb_index] = self._described(outputs)
        self._activations[mb_index] = tuple(_there(tensor.detach()) for tensor in outputs)

    def get_local_bwd_output(self, mb_index: int) -> tuple[torch.Tensor | None, ...]:
        """Of what the stage before gave; None for what it does not train."""
        return tuple(
            _there(torch.zeros(shape.size, dtype=shape.dtype, device=self.device) if gradient is None else gradient)
            if shape.trained
            else None
            for gradient, shape in zip(self.bwd_cache.pop(mb_index), self._shapes.pop(mb_index), strict=True)
        )

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int) -> None:
        self._gradients[mb_index] = next_stage_bwd_outputs

    # -- inside --------------------------------------------------------------------------------------------------------

    def _operation(self, call: Any, tensor: torch.Tensor, stage: int) -> dist.P2POp:
        return dist.P2POp(call, tensor, self._resolve_peer_global_rank(stage), self.group)

    def _described(self, outputs: Sequence[Any]) -> tuple[Shape, ...]:
        for tensor in outputs:
            plain = isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor)
            if not plain or tensor.dtype not in _DTYPES or tensor.dim() > _DIMS:
                raise UsageError(
                    f"the last layer of stage {self.stage_index} gives a {_named(tensor)}: between stages travel "
                    f"tensors, or tuples of them, with at most {_DIMS} dimensions"
                )
        if len(outputs) > _TENSORS:
            raise UsageError(
                f"the last layer of stage {self.stage_index} gives {len(outputs)} tensors, at most {_TENSORS} travel"
            )
        return tuple(Shape(tensor.dtype, tensor.requires_grad, tuple(tensor.shape)) for tensor in outputs)

    def _tell(self, samples: int | None, shapes: tuple[Shape, ...]) -> None:
        before = None if samples is None else self._outgoing.setdefault(samples, shapes)
        if before is not None and before is not shapes:
            if before != shapes:
                raise UsageError(
                    f"micro-batches of {samples} samples leave stage {self.stage_index} in other shapes than before, "
                    f"{[shape.size for shape in shapes]} and not {[shape.size for shape in before]}: pad inputs to one "
                    "length"
                )
            return
        message = torch.tensor(_written(shapes), dtype=torch.int64, device=self.device)
        work = dist.isend(message, self._resolve_peer_global_rank(self.stage_index + 1), self.group)
        assert work is not None
        self._telling.append((message, work))

    def _told(self, samples: int | None) -> tuple[Shape, ...]:
        if samples is not None and samples in self._incoming:
            return self._incoming[samples]
        message = torch.empty(len(_written(())), dtype=torch.int64, device=self.device)
        dist.recv(message, self._resolve_peer_global_rank(self.stage_index - 1), self.group)
        shapes = _read(message.tolist())
        if samples is not None:
            self._incoming[samples] = shapes
        return shapes


def _written(shapes: Sequence[Shape]) -> list[int]:
    found = [len(shapes)]
    for shape in shapes:
        padding = [0] * (_DIMS - len(shape.size))
        found += [_DTYPES.index(shape.dtype), int(shape.trained), len(shape.size), *shape.size, *padding]
    return found + [0] * ((_TENSORS - len(shapes)) * (_DIMS + 3))


def _read(message: Sequence[int]) -> tuple[Shape, ...]:
    width, found = _DIMS + 3, []
    for number in range(message[0]):
        dtype, trained, dims, *size = message[1 + number * width : 1 + (number + 1) * width]
        found.append(Shape(_DTYPES[dtype], bool(trained), tuple(size[:dims])))
    return tuple(found)


def _there(tensor: torch.Tensor) -> torch.Tensor:
    """Where it is the result of a collective that is under way: once that is complete."""
    waited: torch.Tensor = tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor
    return waited


def _no_view(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor._is_view() else tensor


def _named(value: Any) -> str:
    return f"{value.dtype} of {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
