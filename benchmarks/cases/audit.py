"""What audits of masters, moments and updates cost one rank, next to a micro-batch of its own.

One process, without what ranks exchange: in every step 8 bytes of each rank, in an audited one what it has sampled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.figures import Figure, Target, ratio
from benchmarks.options import Options
from benchmarks.workload import LARGE, TINY, build

CASE = "audit"
EVERY_STEPS = 10
_RANKS_COMPUTED = 3


def measure(options: Options) -> list[Figure]:
    import torch

    size, steps = (TINY if options.quick else LARGE), options.pick(30, 4)
    model, optimizer, data = build(size)
    tokens = torch.stack([torch.as_tensor(data[number]) for number in range(size.micro)])
    state = _Masters(model, optimizer)
    rest, sampled = _audits(state)
    micro_s, rest_s, update_s = [], [], []
    for step in range(steps):
        opened_s = _timed(rest.begin)
        micro_s.append(_timed(lambda: model(tokens).backward()))
        closed_s = _timed(lambda: rest.changed(1))
        update_s.append(sampled(step))
        optimizer.zero_grad()
        rest_s.append(opened_s + closed_s + _timed(rest.rest))
    note = f"{size.name} model, masters and moments whole on one rank, audit.every_steps: {EVERY_STEPS}"
    # The first steps read everything, to learn how long it takes.
    micro = Figure(CASE, "a micro-batch", "s", tuple(micro_s[2:]), notes=(note,))
    memory = Figure(CASE, "masters and moments read, in a step", "s", tuple(rest_s[2:]), notes=(note,))
    update = Figure(CASE, "updates sampled and repeated, in an audited step", "s", tuple(update_s[2:]), notes=(note,))
    share = 1.0 / EVERY_STEPS
    return [
        micro, memory, update,
        ratio(CASE, "memory, over a micro-batch", memory, micro, Target("median", share)),
        ratio(CASE, "updates of one audit, over a micro-batch", update, micro, Target("median", 1.0)),
    ]  # fmt: skip


class _Masters:
    """Every parameter is a master of its own, as in stage 0."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        from elastic.core.sharding.layout import Chunk
        from elastic.engines.live_state import Master

        self.base, self._named = optimizer, dict(model.named_parameters())
        self._masters = [
            Master(name, 0, value, (Chunk(name, 0, value.numel(), name, 0),), (name,), replicated=True)
            for name, value in self._named.items()
        ]

    def masters(self) -> list[Any]:
        return self._masters

    def weights(self) -> list[Any]:
        return []

    def fragments(self, names: Any = None) -> Iterator[Any]:
        from elastic.engines.live_state import Fragment

        for name, value in self._named.items():
            if names is None or name in names:
                kinds = {"master": value, **self.base.state.get(value, {})}
                for kind, kept in kinds.items():
                    if kept.dim():
                        yield Fragment(kind, name, 0, kept.detach().reshape(-1))


def _audits(state: _Masters) -> tuple[Any, Callable[[int], float]]:
    """(of the memory; makes a step and gives the seconds that sampling and repeating it take)."""
    from elastic.training.watch.at_rest import AtRest
    from elastic.training.watch.update_sample import Sample, places, sampling
    from elastic.training.watch.update_table import UpdateTable

    stand_in: Any = state

    def sampled(step: int) -> float:
        sample = Sample()
        began = time.perf_counter()
        chosen = places(stand_in.masters(), step)
        with sampling(stand_in, chosen, sample):
            # The step itself is repeated, so that what is read around it is left: both have the same gradients.
            stand_in.base.step()
        with_s = time.perf_counter() - began - _timed(stand_in.base.step)
        began = time.perf_counter()
        table = UpdateTable.of(stand_in, sample.groups)
        rows = table.rows(sample, chosen, stand_in.masters())
        for _ in range(_RANKS_COMPUTED):
            assert table.apart(rows, table.again(stand_in.base, rows, rows.device))[0] == 0.0
        return max(0.0, with_s) + time.perf_counter() - began

    return AtRest(stand_in, stand_in, EVERY_STEPS), sampled


def _timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
