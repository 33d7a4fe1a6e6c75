"""The gradients of a step, averaged over all ranks by the strategy that the job names or that is the fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import median

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
from elastic.core.policy.strategy_switch import Choice, Looks, after_look, is_faster
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
        self._looks = Looks(settings.check_every_steps)
        self._choice: Choice | None = None
        self._steps = 0
        # Seconds in exchanges until now, and of each step since the last window.
        self._waited_s = 0.0
        self._window: list[float] = []

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
        names, before, step, why = permitted(self._settings), self._choice, self._steps, ""
        self._steps += 1
        if len(names) == 1 or self._messages.ranks == 1:
            self._choice = before or Choice(names[0], step)
            why = "as the job says" if len(names) == 1 else "one rank has nobody to send to"
        elif before is None:
            self._choice = Choice(names[0], step)
            why = "until the links are looked at"
        if len(names) > 1 < self._messages.ranks:
            drifted = self._drifted(step)
            why = self._look(sizes, names, step, drifted) if drifted or step >= self._looks.next else why
        assert self._choice is not None
        if self._choice is not before and (before is None or self._choice.since == step):
            self._ledger.remark = f"{self._choice.strategy}: {why}"
        return self._choice.strategy

    def _drifted(self, step: int) -> bool:
        """Do exchanges take another time than they did after the last look? On a device that is known too late."""
        if self._ledger.on_device:
            return False
        self._window.append(self._ledger.waited_s - self._waited_s)
        self._waited_s = self._ledger.waited_s
        if not self._looks.window_ends(step):
            return False
        # The rank that comes last to its exchanges waits for nobody in them.
        (found,) = self._messages.slowest([-median(self._window)], self._device)
        self._window.clear()
        self._looks, drifted = self._looks.drifted(step, -found)
        return drifted

    def _look(self, sizes: list[int], names: tuple[str, ...], step: int, drifted: bool) -> str:
        """Measure the links and choose; returns what each strategy would cost, in words. Collective."""
        assert self._choice is not None
        costs, spent_s = self._costs(sizes, names)
        if self._looks.last is not None and (drifted or is_faster(self._choice, costs)):
            # One look may be wrong: others use the processors and the links, too.
            again, more_s = self._costs(sizes, names)
            costs, spent_s = {name: (costs[name] + again[name]) / 2 for name in costs}, spent_s + more_s
        # An exact strategy may change between any two steps, at no cost.
        switch_s = spent_s if self.feedback is not None else 0.0
        self._choice, self._looks = after_look(self._choice, self._looks, costs, step, switch_s, drifted)
        self._window.clear()
        self._waited_s = self._ledger.waited_s
        return ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in costs.items())

    def _costs(self, sizes: list[int], names: tuple[str, ...]) -> tuple[dict[str, float], float]:
        """Seconds of a step by strategy, and of finding that out. Collective."""
        largest, again = max(sizes, default=0) // self._messages.ranks, self._looks.last is not None
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
