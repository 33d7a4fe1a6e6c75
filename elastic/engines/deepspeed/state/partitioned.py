"""Stages 1 and 2, and BF16_Optimizer: each parameter group is one flat buffer, cut into equal parts.

Follows deepspeed/runtime/zero/stage_1_and_2.py (430-586: flattening, 3172: low-precision weights) and
deepspeed/runtime/bf16_optimizer.py (its `_setup_for_real_optimizer`), release 0.19.8.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from elastic.core.sharding.layout import Chunk, Layout
from elastic.core.sharding.zero import zero12_layout
from elastic.engines.deepspeed.state.zero import ZeroState
from elastic.engines.live_state import Extra, Master, Weight, frozen_whole, weights_whole


class PartitionedState(ZeroState):
    """The live state of `DeepSpeedZeroOptimizer` (ZeRO 1 and 2) or of `BF16_Optimizer` (ZeRO 1 with fp32 gradients)."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.zero_stage = int(engine.zero_optimization_stage())
        self._bf16 = type(engine.optimizer).__name__ == "BF16_Optimizer"
        self.base: torch.optim.Optimizer = engine.optimizer.optimizer

    def groups(self) -> list[list[str]]:
        return [[self._names[id(parameter)] for parameter in group] for group in self._listed()]

    def masters(self) -> list[Master]:
        wrapper = self._wrapper
        flats = wrapper.fp32_groups_flat_partition if self._bf16 else wrapper.single_partition_of_fp32_groups
        found = []
        for number, (flat, placed) in enumerate(zip(flats, self._placed(), strict=True)):
            buffer = f"group{number}"
            chunks = [self._chunk(name, numel, begin, flat.numel(), buffer) for name, numel, begin in placed]
            kept = tuple(chunk for chunk in chunks if chunk.numel > 0)
            names = tuple(name for name, _, _ in placed)
            found.append(Master(buffer, number, flat, kept, names, replicated=False))
        return found

    def frozen(self) -> list[Extra]:
        return frozen_whole(self.module, [name for group in self.groups() for name in group])

    def weights(self) -> list[Weight]:
        return weights_whole(self.module, [name for group in self.groups() for name in group])

    def expected(self) -> Layout:
        groups = [[(self._names[id(parameter)], parameter.numel()) for parameter in group] for group in self._listed()]
        aligned = not self._bf16 and bool(self._wrapper.parameter_alignment)
        element_bytes = self._listed()[0][0].element_size()
        return zero12_layout(
            groups,
            self.world_size,
            round_robin=not self._bf16 and bool(self._wrapper.round_robin_gradients),
            parameter_alignment_elements=16 // element_bytes if aligned else 1,
        )

    def ranks_of_parts(self) -> set[int]:
        return {dist.get_rank(group) for group in self._wrapper.real_dp_process_group}

    def finish_install(self) -> None:
        self._wrapper.update_lp_params()
        # Fragments of optimizer state are views made after the first step; new state tensors need new views.
        self._wrapper._link_all_hp_params()
        self._wrapper._hp_optimizer_states_linked = False
        if all(self.base.state.get(master.tensor) for master in self.masters()):
            self._wrapper._lazy_init_hp_params_optimizer_state()

    def _listed(self) -> list[list[torch.Tensor]]:
        """Optimized parameters by group, in the user's order."""
        groups: list[list[torch.Tensor]] = self._wrapper.bf16_groups if self._bf16 else self._wrapper.bit16_groups
        return groups

    def _placed(self) -> list[list[tuple[str, int, int]]]:
        """(name, numel, offset in the group's whole flat) in the order of the flat, by group."""
        if self._bf16:
            return [_end_to_end([(self._names[id(p)], p.numel()) for p in group]) for group in self._listed()]
        # The flat's order is the round-robin one, whichever order the groups are listed in.
        return [
            [(self._names[id(p)], p.numel(), int(at)) for p, at in zip(group, offsets, strict=True)]
            for group, offsets in zip(
                self._wrapper.round_robin_bit16_groups, self._wrapper.round_robin_bit16_offsets, strict=True
            )
        ]

    def _chunk(self, name: str, numel: int, begin: int, part: int, buffer: str) -> Chunk:
        """What lies of [begin, begin + numel) in this rank's part; numel 0 or less where nothing does."""
        low, high = max(begin, self.rank * part), min(begin + numel, (self.rank + 1) * part)
        return Chunk(name, low - begin, high - low, buffer, low - self.rank * part)


def _end_to_end(tensors: list[tuple[str, int]]) -> list[tuple[str, int, int]]:
    placed, offset = [], 0
    for name, numel in tensors:
        placed.append((name, numel, offset))
        offset += numel
    return placed
