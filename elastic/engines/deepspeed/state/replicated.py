"""Stage 0: every rank holds everything, but for other ranks' experts. fp32 trains the model's own parameters; bf16 and
fp16 train fp32 masters.

Follows deepspeed/runtime/engine.py (`_configure_optimizer`), fp16/unfused_optimizer.py (one master per parameter) and
fp16/fused_optimizer.py (one flat master per group), release 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from elastic.core.sharding.layout import Chunk, RankLayout
from elastic.core.sharding.zero import replicated_layout
from elastic.engines.deepspeed.experts.placement import is_expert
from elastic.engines.deepspeed.state.zero import ZeroState
from elastic.engines.live_state import Beside, Extra, Master, Weight, frozen_whole, whole_buffer


class ReplicatedState(ZeroState):
    """The live state of a plain torch optimizer, of `FP16_UnfusedOptimizer` or of `FP16_Optimizer`."""

    zero_stage = 0

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._flat = hasattr(self._wrapper, "fp32_groups_flat")
        self._unfused = not self._flat and hasattr(self._wrapper, "fp32_groups")
        self.base: torch.optim.Optimizer = self._wrapper.optimizer if self._flat or self._unfused else self._wrapper
        self._alike = self.place.alike
        if self.place.ep > 1:
            self.once, *_ = engine.expert_parallel_group.values()

    def groups(self) -> list[list[str]]:
        return [[self._names[id(parameter)] for parameter in group] for group in self._listed()]

    def masters(self) -> list[Master]:
        if self._flat:
            return self._flat_masters()
        found = []
        for number, group in enumerate(self._listed()):
            held = self._wrapper.fp32_groups[number] if self._unfused else group
            for parameter, master in zip(group, held, strict=True):
                name = self._names[id(parameter)]
                chunk = Chunk(name, self.first_element(parameter), parameter.numel(), whole_buffer(name), 0)
                among = self._alike if is_expert(parameter) else None
                found.append(
                    Master(
                        chunk.buffer, number, master, (chunk,), (name,), replicated=True, among=among,
                        others=among is None,
                    )
                )  # fmt: skip
        return found

    def frozen(self) -> list[Extra]:
        return frozen_whole(self.module, [name for group in self.groups() for name in group])

    def weights(self) -> list[Weight]:
        return self.whole_weights([name for group in self.groups() for name in group])

    def beside(self) -> Iterator[Beside]:
        # In `parameter.grad`; the step's fp32 copies are gone with it.
        yield Beside("lane")

    def expected(self) -> RankLayout | None:
        if self._flat:
            return None
        listed = {self._names[id(parameter)]: parameter for group in self._listed() for parameter in group}
        sizes = [(name, parameter.numel()) for name, parameter in listed.items()]
        whole = replicated_layout(sizes, self.world_size).ranks[self.rank]
        first = {name: self.place.first(numel, is_expert(listed[name])) for name, numel in sizes}
        return RankLayout(tuple(each._replace(start=first[each.name]) for each in whole.chunks), whole.buffers)

    def ranks_of_parts(self) -> Iterator[tuple[int, int]]:
        return self.shares_of_experts()

    @torch.no_grad()
    def finish_install(self) -> None:
        for group, masters in zip(self._listed(), self._held(), strict=True):
            for parameter, master in zip(group, masters, strict=True):
                if parameter is not master:
                    parameter.data.copy_(master.data.view(parameter.shape))

    def _listed(self) -> list[list[torch.Tensor]]:
        """Optimized parameters by group. Empty ones hold nothing."""
        if self._flat or self._unfused:
            groups: list[list[torch.Tensor]] = self._wrapper.fp16_groups
            return groups
        return [[p for p in group["params"] if p.requires_grad and p.numel()] for group in self.base.param_groups]

    def _held(self) -> list[list[torch.Tensor]]:
        """The masters in the order of `_listed`."""
        if self._flat:
            return [
                list(flat.data.split([parameter.numel() for parameter in group]))
                for flat, group in zip(self._wrapper.fp32_groups_flat, self._listed(), strict=True)
            ]
        held: list[list[torch.Tensor]] = self._wrapper.fp32_groups if self._unfused else self._listed()
        return held

    def _flat_masters(self) -> list[Master]:
        found = []
        for number, (flat, group) in enumerate(zip(self._wrapper.fp32_groups_flat, self._listed(), strict=True)):
            chunks, offset = [], 0
            for parameter in group:
                chunks.append(Chunk(self._names[id(parameter)], 0, parameter.numel(), f"group{number}", offset))
                offset += parameter.numel()
            names = tuple(chunk.name for chunk in chunks)
            found.append(Master(f"group{number}", number, flat, tuple(chunks), names, replicated=True))
        return found
