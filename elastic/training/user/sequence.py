"""Sequences that are shared by the ranks of a cell (`mesh: {sp: N}`): parts of tensors, attention over the whole
sequence, and means over it.

Attention over a shared sequence is DeepSpeed-Ulysses (https://arxiv.org/abs/2309.14509): between attention layers a
rank has all heads of its part of the sequence, within them the whole sequence of its part of the heads. Two exchanges
per layer and direction, of 4 and 1 activations' size divided by the ranks of the cell.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from elastic.core.errors import GenerationEnded, UsageError
from elastic.training import context
from elastic.training.generation import Generation

_Attention = TypeVar("_Attention", bound=Callable[..., torch.Tensor])
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _between_graphs(function: _Function) -> _Function:
    """Of ranks that share sequences. torch.compile would trace into the collectives, and keep their group and which
    part this rank has."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and size() > 1:
            return torch.compiler.disable(function, reason="sequences are shared")(*args, **kwargs)  # type: ignore[no-untyped-call]
        return function(*args, **kwargs)

    return cast(_Function, called)


def size() -> int:
    """How many ranks share each sequence: `sp` of the job's mesh. 1 outside of a generation."""
    generation = context.current()
    return 1 if generation is None else generation.scope.spec.sp


def rank() -> int:
    """Which part of each sequence this rank has, from 0."""
    generation = context.current()
    return 0 if generation is None else generation.scope.spec.mesh.sequence(generation.scope.spec.rank)


def group() -> dist.ProcessGroup | None:
    """The process group of the cell, for code that needs one; None where each rank has sequences of its own.

    It belongs to one generation: a training function that asks for it is called again after each change. `attention`
    and `mean` find the group of the generation by themselves.
    """
    generation = context.current()
    return None if generation is None or generation.scope.spec.sp == 1 else generation.group.hand_out("sp")


@_between_graphs
def split(tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """This rank's part of `tensor` along its sequence dimension `dim`: the ranks of a cell have neighbouring parts of
    one length, in their order.

    Give it whatever has a sequence dimension: token ids, labels (shifted before, since a part's last token is followed
    by the next part's first), position ids. The loader gives all ranks of a cell the same whole batch. Raises
    UsageError for a length that is not a multiple of `size()`.
    """
    parts = size()
    length = tensor.shape[dim]
    if length % parts:
        raise UsageError(
            f"dimension {dim} of {tuple(tensor.shape)} cannot be split: {length} is not a multiple of the {parts} "
            "ranks that share each sequence; pad sequences to one"
        )
    # A part of its own: `contiguous` lets the whole go.
    return tensor if parts == 1 else tensor.chunk(parts, dim)[rank()].contiguous()


@_between_graphs
def gather(tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """The whole of what `split` gives parts of, on all ranks of the cell: for what an evaluation has found. It has no
    gradient: raises UsageError for a tensor that needs one."""
    generation = context.current()
    if generation is None or generation.scope.spec.sp == 1:
        return tensor
    if tensor.requires_grad and torch.is_grad_enabled():
        raise UsageError(
            "elastic.sequence.gather was given a tensor that needs a gradient, which it does not have; compute the "
            "loss of each part, and elastic.sequence.mean of these"
        )
    parts = [torch.zeros_like(tensor) for _ in range(generation.scope.spec.sp)]
    if not generation.scope.broken:
        with generation.scope.translating():
            collect = _counted(generation, "all_gather", dist.all_gather)
            collect(parts, tensor.detach().contiguous(), group=generation.group.along("sp"))
    return torch.cat(parts, dim)


@_between_graphs
def mean(total: torch.Tensor, count: torch.Tensor | int) -> torch.Tensor:
    """The mean over the tokens of whole sequences: the sum of all parts' `total` by the sum of their `count`.

    `total` is the sum of the losses of this rank's tokens, `count` their number (those that are not ignored). The
    result is the same on all ranks of the cell, in fp32 at least, and `engine.backward` of it gives the gradient of the
    whole sequences' loss. 0 where no token counts. In a step that is abandoned it is the mean over this rank's part.
    """
    # bf16 cannot count beyond 256.
    total = total.to(torch.promote_types(total.dtype, torch.float32))
    counts = torch.as_tensor(count, device=total.device, dtype=total.dtype).detach()
    generation = context.current()
    if generation is None or generation.scope.spec.sp == 1:
        return total / counts.clamp(min=1)
    try:
        generation.scope.check()
        summed: torch.Tensor = _Sum.apply(generation, total)  # type: ignore[no-untyped-call]
        return summed / _sum(generation, counts).clamp(min=1)
    except (Exception, GenerationEnded) as error:
        if generation.engine is None or not generation.engine.abandons(error):
            raise
        return total / counts.clamp(min=1)


@_between_graphs
def attention(
    local: _Attention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *args: Any,
    heads_dim: int = 1,
    sequence_dim: int = 2,
    **kwargs: Any,
) -> torch.Tensor:
    """`local(query, key, value, *args, **kwargs)` over whole sequences, of tensors that hold this rank's part of them.

    The defaults are the layout [batch, heads, sequence, head size] of torch's `scaled_dot_product_attention`; `local`
    must give its output in the layout of `query`. It sees the whole sequence and `heads / size()` of the heads, so
    masks are those of the whole sequence (`is_causal=True`, say). Raises UsageError for a number of heads that is not a
    multiple of `size()`.
    """
    generation = context.current()
    if generation is None or generation.scope.spec.sp == 1:
        return local(query, key, value, *args, **kwargs)
    parts = generation.scope.spec.sp
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.shape[heads_dim] % parts:
            raise UsageError(
                f"{name} has {tensor.shape[heads_dim]} heads, not a multiple of the {parts} ranks that share each "
                "sequence; repeat the heads of key and value before (grouped-query attention), or use a smaller mesh.sp"
            )
    whole = [_Exchange.apply(generation, tensor, heads_dim, sequence_dim) for tensor in (query, key, value)]  # type: ignore[no-untyped-call]
    output = local(*whole, *args, **kwargs)
    return _Exchange.apply(generation, output, sequence_dim, heads_dim)  # type: ignore[no-untyped-call, no-any-return]


# -- inside ------------------------------------------------------------------------------------------------------------


class _Exchange(torch.autograd.Function):
    """Each rank of the cell gives part r along `scatter` to rank r, and joins what it gets along `gather`."""

    @staticmethod
    def forward(ctx: Any, generation: Generation, tensor: torch.Tensor, scatter: int, gather: int) -> torch.Tensor:
        ctx.generation, ctx.scatter, ctx.gather = generation, scatter, gather
        return _exchange(generation, tensor, scatter, gather)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, _exchange(ctx.generation, gradients[0], ctx.gather, ctx.scatter), None, None


class _Sum(torch.autograd.Function):
    """The sum over the cell; every rank's loss is the same one, so the gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, generation: Generation, tensor: torch.Tensor) -> torch.Tensor:
        ctx.generation = generation
        return _sum(generation, tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, _sum(ctx.generation, gradients[0])


def _sum(generation: Generation, tensor: torch.Tensor) -> torch.Tensor:
    summed = tensor.detach().clone()
    if not generation.scope.broken:
        with generation.scope.translating():
            _counted(generation, "all_reduce", dist.all_reduce)(summed, group=generation.group.along("sp"))
    return summed


def _counted(generation: Generation, op: str, call: Callable[..., Any]) -> Callable[..., Any]:
    return call if generation.ledger is None else generation.ledger.timed(op, call)


def _exchange(generation: Generation, tensor: torch.Tensor, scatter: int, gather: int) -> torch.Tensor:
    """In a step that is abandoned: zeros of the same shape, without a collective."""
    parts = generation.scope.spec.sp
    given = torch.stack(tensor.detach().chunk(parts, scatter))
    taken = torch.zeros_like(given)
    if not generation.scope.broken:
        with generation.scope.translating():
            exchange = _counted(generation, "all_to_all_single", dist.all_to_all_single)
            exchange(taken, given, group=generation.group.along("sp"))
    return torch.cat(taken.unbind(0), gather)
