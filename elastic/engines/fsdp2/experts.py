"""Layers of experts that ranks share (`mesh: {ep: N}`): each rank has some experts, and computes them for the tokens of
all.

The parameters of a layer are cut by experts over the ranks that share them, and what a rank then has is sharded by
`fully_shard` over the ranks with the same experts. The layer is called as ever; its rows travel to the ranks that have
their experts, and the answers back. No row is dropped, and none waits for others: a layer is called with what came.

Ranks that share layers (`tp`) call it with the same rows. Each then sends a part of them, and all get all answers, as
each gets the gradients of all rows: between the two no row is computed twice, and no expert is there twice.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from elastic.comm.collective_ledger import CollectiveLedger
from elastic.core.errors import UsageError
from elastic.engines.fsdp2.meshes import EXPERTS, Meshes
from elastic.engines.model.expert_layers import ROUTED, NoDraws, form_of


def share(layers: Mapping[str, Any], meshes: Meshes) -> None:
    """In place: each layer's parameters become DTensors cut by experts, by `tp` and then by `ep`, with the values that
    this rank has (all ranks have the same), and its calls travel. Nothing where every rank has all experts."""
    if meshes.experts is None:
        return
    mesh = meshes.experts[EXPERTS] if meshes.tp is None else meshes.experts["tp", EXPERTS]
    place = 0
    for axis in range(mesh.ndim):
        place = place * mesh.size(axis) + mesh.get_local_rank(axis)
    for name, layer in layers.items():
        for own, parameter in layer.named_parameters(recurse=False):
            part = parameter.detach().chunk(mesh.size())[place]
            shape, stride, placements = parameter.shape, parameter.stride(), (Shard(0),) * mesh.ndim
            cut = DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)
            layer._parameters[own] = nn.Parameter(cut, requires_grad=parameter.requires_grad)
        vars(layer)["forward"] = _Travelling(name, layer, meshes)


def undo(model: nn.Module) -> None:
    """Calls do not travel any more. The parameters are the caller's."""
    for module in model.modules():
        if (found := _travelling(module)) is not None:
            del vars(module)["forward"]
            vars(module).update(found.before)


def count_exchanges(model: nn.Module, ledger: CollectiveLedger) -> None:
    """From here on the ledger has the exchanges of the layers' rows."""
    for module in model.modules():
        found = _travelling(module)
        if found is not None:
            found.exchange.call = ledger.timed("all_to_all_single", dist.all_to_all_single)
            found.cell.call = ledger.timed("all_gather_into_tensor", dist.all_gather_into_tensor)


def end_exchanges(model: nn.Module) -> None:
    """The groups are about to end: the graph of a loss that the user's loop still has must not keep them."""
    for module in model.modules():
        found = _travelling(module)
        if found is not None:
            found.exchange.end()
            found.cell.end()


def _travelling(module: nn.Module) -> _Travelling | None:
    found = vars(module).get("forward")
    return found if isinstance(found, _Travelling) else None


class _Exchange:
    """Rows between the ranks that share experts."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group: dist.ProcessGroup | None = group
        self.call: Callable[..., Any] = dist.all_to_all_single

    def end(self) -> None:
        self._group, self.call = None, _over

    def counts(self, own: torch.Tensor) -> torch.Tensor:
        """`own` [ranks, n] has a row for each rank; gives that which each rank has for this one."""
        found = torch.empty_like(own)
        self.call(found, own.contiguous(), group=self._group)
        return found

    def rows(self, sent: torch.Tensor, sizes: list[int], found: list[int]) -> torch.Tensor:
        """The first `sizes[0]` rows go to rank 0 and so on; `found` rows come from each."""
        into = sent.new_empty(sum(found), *sent.shape[1:])
        self.call(into, sent.contiguous(), found, sizes, group=self._group)
        return into


class _Cell:
    """The ranks that are called with the same rows, of which each has a part: in blocks, of which the last may be short
    or empty."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.size, self.rank = (1, 0) if group is None else (group.size(), group.rank())
        self.call: Callable[..., Any] = dist.all_gather_into_tensor

    def end(self) -> None:
        self._group, self.call = None, _over

    def part(self, rows: int) -> slice:
        block = -(-rows // self.size)
        return slice(min(rows, self.rank * block), min(rows, (self.rank + 1) * block))

    def whole(self, part: torch.Tensor, rows: int) -> torch.Tensor:
        """Of `rows` in all, of which this rank has `part`."""
        block = -(-rows // self.size)
        padded = torch.cat([part, part.new_zeros(block - len(part), *part.shape[1:])])
        into = part.new_empty(block * self.size, *part.shape[1:])
        self.call(into, padded, group=self._group)
        return into[:rows]


class _Part(torch.autograd.Function):
    """This rank's rows of what all of its cell have, each with the same gradient of all rows."""

    @staticmethod
    def forward(ctx: Any, cell: _Cell, *whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.cell, ctx.rows = cell, len(whole[0])
        return tuple(each[cell.part(ctx.rows)] for each in whole)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        needed = ctx.needs_input_grad[1:]
        found = (
            ctx.cell.whole(each, ctx.rows) if wanted else None for each, wanted in zip(gradients, needed, strict=True)
        )
        return (None, *found)


class _Whole(torch.autograd.Function):
    """All rows of a cell's ranks, on each of them. What follows computes the same on all: a rank's rows get that
    gradient once."""

    @staticmethod
    def forward(ctx: Any, cell: _Cell, rows: int, part: torch.Tensor) -> torch.Tensor:
        ctx.cell, ctx.rows = cell, rows
        return cell.whole(part, rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, None, gradient[ctx.cell.part(ctx.rows)]


def _over(*_: Any, **__: Any) -> None:
    raise RuntimeError("experts were called, or their gradients computed, after the end of their generation")


class _Travel(torch.autograd.Function):
    """Rows of several tensors to other ranks, and their gradients back: on all ranks, whatever each uses of them."""

    @staticmethod
    def forward(
        ctx: Any, exchange: _Exchange, sizes: list[int], found: list[int], *sent: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.exchange, ctx.sizes, ctx.found = exchange, sizes, found
        return tuple(exchange.rows(each, sizes, found) for each in sent)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        needed = ctx.needs_input_grad[3:]
        back = (
            ctx.exchange.rows(each, ctx.found, ctx.sizes) if wanted else None
            for each, wanted in zip(gradients, needed, strict=True)
        )  # fmt: skip
        return (None, None, None, *back)


def _travel(exchange: _Exchange, sizes: list[int], found: list[int], *sent: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The first `sizes[0]` rows of each tensor go to the first rank, and so on; `found` come from each."""
    there: tuple[torch.Tensor, ...] = _Travel.apply(exchange, sizes, found, *sent)  # type: ignore[no-untyped-call]
    return there


class _Travelling:
    """Stands for a layer's `forward`: on each rank with that rank's experts and the rows that are theirs."""

    def __init__(self, name: str, layer: Any, meshes: Meshes) -> None:
        assert meshes.exchange is not None
        self._name = name
        self._layer = layer
        # What of the instance's own is hidden meanwhile.
        self.before = {key: vars(layer)[key] for key in ("forward",) if key in vars(layer)}
        self._forward: Callable[..., torch.Tensor] = layer.forward
        self._signature = inspect.signature(layer.forward)
        self._form = form_of(layer)
        self._experts: int = layer.num_experts
        self._ranks = meshes.exchange.size()
        self._own = self._experts // self._ranks
        self._draws = NoDraws(name)
        self.exchange = _Exchange(meshes.exchange)
        self.cell = _Cell(None if meshes.tp is None else meshes.tp.get_group())

    # Between graphs: how many rows travel is known when they do. Of torch's own hooks around it the same is true.
    @torch.compiler.disable(reason="experts are shared")  # type: ignore[no-untyped-call, untyped-decorator]
    def __call__(self, *inputs: Any, **named: Any) -> torch.Tensor:
        bound = self._signature.bind(*inputs, **named)
        bound.apply_defaults()
        given = tuple(bound.arguments.values())
        if not all(isinstance(each, torch.Tensor) for each in given):
            raise UsageError(f"the layer of experts {self._name!r} must be called with tensors alone, not {given}")
        self._require_form(*given)
        if self.cell.size == 1:
            return self._routed(*given) if self._form == ROUTED else self._grouped(*given)
        return self._shared(*given)

    def _shared(self, rows: torch.Tensor, chosen: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        """By the ranks of a cell together, each for its part of the rows that all of them were given."""
        own = self.cell.part(len(rows))
        parts: tuple[torch.Tensor, ...] = _Part.apply(self.cell, rows, *weights)  # type: ignore[no-untyped-call]
        if weights:
            found = self._routed(parts[0], chosen[own], parts[1])
        else:
            self._require_alike(chosen)
            last = chosen.to(torch.int64).cumsum(0)
            before = torch.cat([last.new_zeros(1), last]).clamp(own.start, own.stop)
            found = self._grouped(parts[0], before.diff().to(chosen.dtype))
        whole: torch.Tensor = _Whole.apply(self.cell, len(rows), found)  # type: ignore[no-untyped-call]
        return whole

    def _routed(self, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        chosen, per_token = index.reshape(-1), index.shape[-1]
        order = self._place(chosen).argsort(stable=True)
        answers = self._answers(
            tokens.index_select(0, order // per_token), chosen.bincount(minlength=self._experts),
            weights.reshape(-1).index_select(0, order),
        )  # fmt: skip
        # Back in the order of the tokens, whose answers are so added up in one order on every device.
        return answers.index_select(0, order.argsort()).view(*index.shape, answers.shape[-1]).sum(1)

    def _grouped(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        if self.cell.size in (1, self._ranks):
            return self._answers(rows, counts)
        expert = torch.arange(self._experts, device=rows.device).repeat_interleave(counts.to(torch.int64))
        order = self._place(expert).argsort(stable=True)
        return self._answers(rows.index_select(0, order), counts).index_select(0, order.argsort())

    def _place(self, expert: torch.Tensor) -> torch.Tensor:
        """Where its rows lie among those that travel, by the ranks of the exchange: whose order has the parts of a cell
        beside each other, which are `ep` apart in the order of experts."""
        tp = self.cell.size
        if tp in (1, self._ranks):
            return expert
        holder, ep = expert // self._own, self._ranks // tp
        found: torch.Tensor = (holder % ep * tp + holder // ep) * self._own + expert % self._own
        return found

    def _answers(self, rows: torch.Tensor, counts: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        """Of rows in the order in which they travel; `counts`: by expert."""
        if len(counts) != self._experts:
            raise UsageError(f"{self._name!r} was given the number {len(counts) - 1} of an expert, and has none such")
        there = counts.to(torch.int64).view(self.cell.size, -1, self._own).transpose(0, 1)
        there = there.reshape(self._ranks, self._own)
        here = self.exchange.counts(there)
        sizes, found = there.sum(1).tolist(), here.sum(1).tolist()
        if sum(sizes) != len(rows):
            raise UsageError(f"{self._name!r} was given {len(rows)} tokens, and experts with {sum(sizes)} of them")
        received = _travel(self.exchange, sizes, found, rows, *weights)
        expert = torch.arange(self._own, device=rows.device).repeat(self._ranks).repeat_interleave(here.reshape(-1))
        answers = self._computed(expert, counts.dtype, *received)
        (back,) = _travel(self.exchange, found, sizes, answers)
        return back

    def _computed(
        self, expert: torch.Tensor, kind: torch.dtype, rows: torch.Tensor, *weights: torch.Tensor
    ) -> torch.Tensor:
        """`expert`: of this rank's, one for each row."""
        count, shape = len(rows), rows.shape
        if not count:
            # A layer that is not called gives its parameters no gradients, for which the other ranks would wait.
            expert, rows = expert.new_zeros(1), torch.cat([rows, rows.new_zeros(1, *shape[1:])])
            weights = tuple(torch.cat([each, each.new_zeros(1)]) for each in weights)
        order = expert.argsort(stable=True)
        self._draws.begin(self._layer, (rows,))
        with self._with_own_experts():
            if weights:
                found = self._forward(rows, expert[:, None], weights[0][:, None])
            else:
                each = expert.bincount(minlength=self._own).to(kind)
                found = self._forward(rows[order], each)[order.argsort()]
        self._draws.end(self._layer, (rows,))
        found = found[:count]
        if found.shape != shape:
            raise UsageError(
                f"the layer of experts {self._name!r} gives {[*found.shape]} for tokens of the shape {[*shape]}; ranks "
                "can share experts whose answers are like their tokens"
            )
        return found

    def _require_alike(self, counts: torch.Tensor) -> None:
        """A row of one rank is a row of another expert on one that has chosen otherwise."""
        found = self.cell.whole(counts.to(torch.int64)[None], self.cell.size)
        if not bool(found.eq(found[0]).all()):
            raise UsageError(
                f"the layer of experts {self._name!r} was given other numbers of tokens on some workers of a cell "
                "(mesh.tp), which must choose alike: their routers, or what these are called with, differ"
            )

    @contextmanager
    def _with_own_experts(self) -> Iterator[None]:
        """In it the layer has this rank's experts, as plain tensors."""
        own = {name: _local(parameter) for name, parameter in self._layer._parameters.items()}
        held = vars(self._layer)
        held.update(own, num_experts=self._own)
        try:
            yield
        finally:
            held["num_experts"] = self._experts
            for name in own:
                del held[name]

    def _require_form(self, rows: torch.Tensor, chosen: torch.Tensor, *weights: torch.Tensor) -> None:
        if self._form == ROUTED:
            form = "(tokens [T, H], numbers of experts [T, K], weights [T, K])"
            well = rows.dim() == chosen.dim() == 2 and len(rows) == len(chosen) and not chosen.is_floating_point()
            well = well and chosen.shape == weights[0].shape
        else:
            form = f"(tokens [R, H] in the order of their experts, tokens of each [{self._experts}])"
            well = rows.dim() == 2 and chosen.shape == (self._experts,)
        if not well:
            given = (rows, chosen, *weights)
            shapes = ", ".join(str([*each.shape]) for each in given)
            raise UsageError(f"the layer of experts {self._name!r} must be called with {form}, and was with {shapes}")


def _local(parameter: Any) -> torch.Tensor:
    found: torch.Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return found
