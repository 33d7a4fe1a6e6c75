"""Stages 1 and 2, and BF16_Optimizer: each parameter group is one flat buffer, cut into equal parts.

Follows deepspeed/runtime/zero/stage_1_and_2.py (430-586: flattening, 3172: low-precision weights) and
deepspeed/runtime/bf16_optimizer.py (its `_setup_for_real_optimizer`), release 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from elastic.core.sharding.experts import held
from elastic.core.sharding.layout import Chunk, Layout, RankLayout
from elastic.core.sharding.zero import Group, zero12_layout
from elastic.engines.deepspeed.experts.placement import is_expert
from elastic.engines.deepspeed.state.muon import WholeMomentum
from elastic.engines.deepspeed.state.zero import ZeroState
from elastic.engines.live_state import Beside, Extra, Master, Weight, frozen_whole
from elastic.engines.model.plain_names import named_parameters


class PartitionedState(ZeroState):
    """The live state of `DeepSpeedZeroOptimizer` (ZeRO 1 and 2) or of `BF16_Optimizer` (ZeRO 1 with fp32 gradients)."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.zero_stage = int(engine.zero_optimization_stage())
        self._bf16 = type(engine.optimizer).__name__ == "BF16_Optimizer"
        self.base: torch.optim.Optimizer = engine.optimizer.optimizer

    def groups(self) -> list[list[str]]:
        return [self.counterparts.of_names(self._names[id(p)] for p in group) for group in self._listed()]

    def masters(self) -> list[Master]:
        wrapper = self._wrapper
        flats = wrapper.fp32_groups_flat_partition if self._bf16 else wrapper.single_partition_of_fp32_groups
        found = []
        for number, (flat, placed) in enumerate(zip(flats, self._placed(), strict=True)):
            buffer = f"group{number}"
            rank, _ = self.place.among(is_expert(self._listed()[number][0]))
            chunks = [self._chunk(p, begin, rank * flat.numel(), flat.numel(), buffer) for p, begin in placed]
            kept = tuple(chunk for chunk in chunks if chunk.numel > 0)
            names = tuple(self.counterparts.of_names(self._names[id(p)] for p, _ in placed))
            found.append(Master(buffer, number, flat, kept, names, replicated=False))
        return found

    def frozen(self) -> list[Extra]:
        return frozen_whole(self.module, [name for group in self.groups() for name in group])

    def weights(self) -> list[Weight]:
        trained = [name for group in self.groups() for name in group]
        own, here = self.whole_weights(trained), dict(named_parameters(self.module))
        # Last: what this rank has lies in the same order as on the others.
        nothing = torch.empty(0)
        return own + [Weight(name, 0, nothing, whole=True, experts=True) for name in trained if name not in here]

    def beside(self) -> Iterator[Beside]:
        """stage_1_and_2.py: `_fill_param_grad_accum_attribute`, `copy_grads_in_partition` (whole gradients of what the
        partition has any of), `_build_compact_grad_partition_buffer`, `async_accumulate_grad_in_cpu_via_gpu`,
        `param_buffer_of_bit16_for_cpu_offload_groups`; bf16_optimizer.py: `fp32_groups_gradients_flat`."""
        wrapper = self._wrapper
        if self._bf16:
            yield Beside("lane", element_bytes=wrapper.grad_acc_dtype.itemsize)
            if not wrapper.immediate_grad_update:
                # Those of a backward pass are added to it when all of them are there.
                yield Beside("lane")
            return
        sums, device = wrapper.gradient_accumulation_dtype, self._listed()[0][0].device
        if self.zero_stage == 1:
            yield Beside("lane", element_bytes=sums.itemsize if wrapper.use_grad_accum_attribute else None)
        elif sums == torch.float32 != wrapper.dtype:
            yield Beside("part", device, sums.itemsize)
        elif not (wrapper.cpu_offload and wrapper.low_precision_master_weights_and_grads):
            # With offload only where a step has several micro-batches: in a smaller world it may. Where masters are in
            # half precision they are added up in the masters' own gradients.
            yield Beside("reached", None if wrapper.cpu_offload else device)
        if wrapper.cpu_offload:
            yield Beside("part", element_bytes=wrapper.master_weights_and_grads_dtype.itemsize)
            yield Beside("part")

    def expected(self) -> RankLayout:
        groups = [([(self._names[id(p)], p.numel()) for p in group], is_expert(group[0])) for group in self._listed()]
        aligned = not self._bf16 and bool(self._wrapper.parameter_alignment)
        element_bytes = self._listed()[0][0].element_size()
        layout = partial(
            zero12_layout,
            round_robin=not self._bf16 and bool(self._wrapper.round_robin_gradients),
            parameter_alignment_elements=16 // element_bytes if aligned else 1,
        )

        def cut(group: Group, size: int, _: int) -> Layout:
            return layout([group], size)

        return held(groups, self.place, cut, "group")

    def ranks_of_parts(self) -> Iterator[tuple[int, int]]:
        for group, listed in zip(self._wrapper.real_dp_process_group, self._listed(), strict=True):
            yield dist.get_rank(group), self.place.among(is_expert(listed[0]))[0]
        yield from self.shares_of_experts()

    def finish_install(self) -> None:
        self._wrapper.update_lp_params()
        # Fragments of optimizer state are views made after the first step; new state tensors need new views.
        self._wrapper._link_all_hp_params()
        self._wrapper._hp_optimizer_states_linked = False
        if (momentum := WholeMomentum.of(self._wrapper)) is not None:
            momentum.exchange()
        if all(self.base.state.get(master.tensor) for master in self.masters()):
            self._wrapper._lazy_init_hp_params_optimizer_state()

    def _listed(self) -> list[list[torch.Tensor]]:
        """Optimized parameters by group, in the user's order."""
        groups: list[list[torch.Tensor]] = self._wrapper.bf16_groups if self._bf16 else self._wrapper.bit16_groups
        return groups

    def _placed(self) -> list[list[tuple[torch.Tensor, int]]]:
        """(parameter, offset in the group's whole flat) in the order of the flat, by group."""
        if self._bf16:
            return [_end_to_end(group) for group in self._listed()]
        # The flat's order is the round-robin one, whichever order the groups are listed in.
        return [
            [(p, int(at)) for p, at in zip(group, offsets, strict=True)]
            for group, offsets in zip(
                self._wrapper.round_robin_bit16_groups, self._wrapper.round_robin_bit16_offsets, strict=True
            )
        ]

    def _chunk(self, parameter: torch.Tensor, begin: int, at: int, part: int, buffer: str) -> Chunk:
        """What lies of a parameter that begins at `begin` in this rank's `part` elements from `at` on; numel 0 or less
        where nothing does."""
        low, high = max(begin, at), min(begin + parameter.numel(), at + part)
        return Chunk(
            self._names[id(parameter)], self.first_element(parameter) + low - begin, high - low, buffer, low - at
        )


def _end_to_end(group: list[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
    placed, offset = [], 0
    for parameter in group:
        placed.append((parameter, offset))
        offset += parameter.numel()
    return placed
