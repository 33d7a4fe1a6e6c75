"""The gradients of a step, averaged over all ranks by the strategy that the job names or that is the fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from elastic.comm.collective_ledger import CollectiveLedger
from elastic.comm.strategies import exact
from elastic.comm.strategies.error_feedback import ErrorFeedback, Shapes
from elastic.comm.strategies.measured_hops import measure_hops
from elastic.comm.strategies.messages import Messages
from elastic.core.policy.communication import permitted
from elastic.core.policy.hops import Islands, exact_costs
from elastic.core.policy.strategy_switch import Choice, first_choice, judged
from elastic.core.settings import CommunicationSettings

# Looks at the links, after a switch, before there can be another.
_QUIET_LOOKS = 2


class Reduction:
    """Of one generation of one rank, on the training thread: `reduce` once per step, by all ranks together.

    Which strategy is used, and why, is remarked in the ledger in the first step and where it changes."""

    def __init__(
        self,
        settings: CommunicationSettings,
        group: dist.ProcessGroup,
        device: torch.device,
        ledger: CollectiveLedger,
        islands: Islands,
        shapes: Shapes,
    ) -> None:
        """`group` are the ranks over which gradients are averaged, `islands` those of them that share a node, `shapes`
        those of the trained parameters by name, in their order."""
        self._settings, self._device, self._islands, self._ledger = settings, device, islands, ledger
        self._messages = messages = Messages(group, islands, ledger)
        inside, between = islands.places[islands.find(messages.rank)[0]], islands.lane(messages.rank)
        self._strategies: dict[str, Callable[[Tensor], object]] = {
            "all_reduce": messages.all_reduce,
            "ring": partial(exact.ring, wire=messages),
            "tree": partial(exact.tree, wire=messages),
            "hierarchical": partial(exact.hierarchical, wire=messages, inside=inside, between=between),
        }
        self.feedback: ErrorFeedback | None = None
        if settings.semantics == "error_feedback":
            self.feedback = ErrorFeedback(settings, islands, messages, shapes, device)
        self._choice: Choice | None = None
        self._steps = 0

    @torch.no_grad()
    def reduce(self, gradients: Mapping[str, Tensor]) -> None:
        """`gradients` by the parameter's name become their means over the ranks, in place. Collective: all ranks have
        the same names and shapes."""
        buckets = list(in_buckets(gradients, int(self._settings.bucket_mb * 1e6)))
        strategy = self._chosen([sum(tensor.nbytes for tensor in bucket) for bucket in buckets])
        if self.feedback is not None:
            self.feedback.reduce(gradients, strategy)
            return
        average = self._strategies[strategy]
        for bucket in buckets if self._messages.ranks > 1 else ():
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            # Before the sum, as DeepSpeed does: half precision holds the mean, not always the sum.
            average(flat.div_(self._messages.ranks))
            for tensor, part in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def _chosen(self, sizes: list[int]) -> str:
        before, names = self._choice, permitted(self._settings)
        every, step = self._settings.check_every_steps, self._steps
        self._steps += 1
        if len(names) == 1 or self._messages.ranks == 1:
            self._choice = self._choice or Choice(names[0], step)
            why = "as the job says" if len(names) == 1 else "one rank has nobody to send to"
        elif before is None or step % every == 0:
            costs, spent_s = self._costs(sizes, names)
            if before is None:
                self._choice = first_choice(costs, step)
            else:
                self._choice = judged(before, costs, step, every, spent_s, _QUIET_LOOKS * every)
            why = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in costs.items())
        assert self._choice is not None
        if before is None or self._choice.strategy != before.strategy:
            self._ledger.remark = f"{self._choice.strategy}: {why}"
        return self._choice.strategy

    def _costs(self, sizes: list[int], names: tuple[str, ...]) -> tuple[dict[str, float], float]:
        """Seconds of a step by strategy, and of finding that out. Collective."""
        largest, again = max(sizes, default=0) // self._messages.ranks, self._choice is not None
        hops, spent_s = measure_hops(self._islands, self._messages, self._device, largest, again)
        if self.feedback is None:
            costs = exact_costs(self._islands, sizes, hops)
        else:
            costs, worked_s = self.feedback.costs(hops, self._messages.slowest)
            spent_s += worked_s
        return {name: costs[name] for name in names if name in costs}, spent_s


def in_buckets(gradients: Mapping[str, Tensor], limit: int) -> Iterator[list[Tensor]]:
    """Neighbours of one dtype, of at most `limit` bytes together, or one tensor."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in gradients.values():
        if bucket and (size + tensor.nbytes > limit or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket
