"""The gradients of a step, averaged over all ranks by the strategy that the job names or that is the fastest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elastic.comm.collective_ledger import CollectiveLedger
from elastic.comm.strategies import exact
from elastic.comm.strategies.error_feedback import ErrorFeedback, Shapes
from elastic.comm.strategies.messages import Messages
from elastic.core.policy.communication import AUTO, permitted
from elastic.core.policy.hops import Islands
from elastic.core.policy.strategy_switch import Switch
from elastic.core.settings import CommunicationSettings


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
        self._settings, self._device, self._ledger = settings, device, ledger
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
        self._names = permitted(settings)
        if len(self._names) > 1 and self.feedback is None and 1 in (islands.width, islands.count):
            # It is a ring then.
            self._names = tuple(name for name in self._names if name != "hierarchical")
        choice = len(self._names) > 1 < messages.ranks
        self._switch = Switch.begin(self._names, settings.check_every_steps) if choice else None
        self._steps = 0
        # What each step since the last agreement has taken: the marks before and after, where a device is to say it.
        self._taken: list[tuple[str, float, Any, Any]] = []

    @torch.no_grad()
    def reduce(self, gradients: Mapping[str, Tensor]) -> None:
        """`gradients` by the parameter's name become their means over the ranks, in place. Collective: all ranks have
        the same names and shapes."""
        strategy = self._chosen()
        self._steps += 1
        mark, began = self._ledger.mark(), time.perf_counter()
        self._average(gradients, strategy)
        if self._switch is not None:
            self._taken.append((strategy, time.perf_counter() - began, mark, self._ledger.mark()))

    def _average(self, gradients: Mapping[str, Tensor], strategy: str) -> None:
        if self.feedback is not None:
            self.feedback.reduce(gradients, strategy)
            return
        average, buckets = self._strategies[strategy], in_buckets(gradients, int(self._settings.bucket_mb * 1e6))
        for bucket in buckets if self._messages.ranks > 1 else ():
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            # Before the sum, as DeepSpeed does: half precision holds the mean, not always the sum.
            average(flat.div_(self._messages.ranks))
            for tensor, part in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def _chosen(self) -> str:
        """The strategy of this step. Collective where the ranks are to agree on what steps have taken."""
        if self._switch is None:
            if self._steps == 0:
                why = "one rank has nobody to send to" if self._settings.strategy == AUTO else "as the job says"
                self._ledger.remark = f"{self._names[0]}: {why}"
            return self._names[0]
        before = self._switch.choice
        if self._steps == 0:
            self._ledger.remark = "each in turn: until it is known what they cost"
        elif self._steps == self._switch.segment.end:
            self._switch = self._switch.heard(self._agreed())
            self._taken.clear()
        choice, costs = self._switch.choice, self._switch.costs
        if choice is not before and choice.since == self._steps:
            told = ", ".join(f"{name} {costs[name] * 1e3:.3g} ms" for name in self._names)
            self._ledger.remark = f"{choice.strategy}: {told}"
        return self._switch.segment.at(self._steps)

    def _agreed(self) -> dict[str, float]:
        """Strategy -> the median seconds of its steps, of the rank that took least: who comes last waits for nobody."""
        spent: dict[str, list[float]] = {}
        for name, seconds, before, after in self._taken:
            if after is not None:
                # Of the step before: the device has work in hand beyond it. Events count milliseconds.
                after.synchronize()
                seconds = before.elapsed_time(after) / 1e3
            spent.setdefault(name, []).append(seconds)
        least = self._messages.slowest([-median(found) for found in spent.values()], self._device)
        return dict(zip(spent, (-seconds for seconds in least), strict=True))


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
