"""DeepSpeed's own Muon: its update is that of whole matrices at every stage, whatever the world size.

Stage 3, BF16_Optimizer and CPU offload keep the momentum cut as the masters are. Stages 1 and 2 keep it otherwise
(stage_1_and_2.py, `_muon_momentum_buffer`, release 0.19.8): of every matrix that a partition has any of, all of it, end
to end. Here the optimizer's state has the partition's part, as of any other optimizer, and `WholeMomentum` the matrices
that lie in several partitions; DeepSpeed is given both together when it makes a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from elastic.core.errors import UsageError

MOMENTUM = "momentum_buffer"
# torch's compiler has a graph for matrices that begin where their storage does, and which ones do depends on the world
# size: here none does.
_LEAD = 16


def is_deepspeeds(optimizer: Any) -> bool:
    """Is it the one whose matrices DeepSpeed's ZeRO knows?"""
    return any(
        kind.__module__ == "deepspeed.runtime.zero.muon.muon_optimizer" and kind.__name__ == "MuonWithAuxAdam"
        for kind in type(optimizer).__mro__
    )


def refuse_dependent(native: Any, tp_sizes: Sequence[int]) -> None:
    """Raise UsageError for what Muon would make otherwise on another mesh, or not at all. Of a built engine."""
    if not is_deepspeeds(native.basic_optimizer):
        return
    if len(tp_sizes) > 1:
        raise UsageError(
            f"the job's mesh says tp: {list(tp_sizes)}, and Muon orthogonalises each slice of a matrix by itself: the "
            "curve would change with it; give one tp, or use AdamW"
        )
    if not (native.optimizer_params() or {}).get("per_head_muon"):
        return
    wrapper = native.optimizer
    unread = {
        "in stage 0": not native.zero_optimization_stage(),
        "with bf16 and gradients added up in fp32 at stage 1": hasattr(wrapper, "_prepare_muon_updates"),
        "with zero_optimization.parameter_alignment": bool(getattr(wrapper, "parameter_alignment", False)),
    }
    for where, is_so in unread.items():
        if is_so:
            raise UsageError(
                f"DeepSpeed option optimizer.params.per_head_muon: DeepSpeed 0.19.8 does not look at it {where}, and "
                "would orthogonalise whole matrices; remove the key"
            )


@dataclass(frozen=True)
class _Matrix:
    """A parameter of `whole` elements that this rank's partition has some of: `numel` from `start` on, at `offset` in
    the partition. `holders` are the other ranks of the group that have some, and which."""

    whole: int
    start: int
    numel: int
    offset: int
    holders: tuple[tuple[int, slice], ...]


class WholeMomentum:
    """In the place of three methods of a `DeepSpeedZeroOptimizer` of stage 1 or 2.

    1. `take_over` when the engine has been built
    2. `_ensured`, `_staged`, `_committed` by DeepSpeed, in each step
    3. `exchange` after a restore: collective
    """

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        # By group and place in the partition, 1-D: all of a matrix that several partitions have parts of.
        self._shared: dict[int, dict[int, torch.Tensor]] = {}
        self._staging: dict[int, torch.Tensor] = {}
        groups = enumerate(wrapper.optimizer.param_groups)
        self._matrices = {number: tuple(self._matrices_of(number)) for number, group in groups if group["use_muon"]}

    @classmethod
    def take_over(cls, wrapper: Any) -> None:
        if not hasattr(wrapper, "_commit_muon_momentum") or not is_deepspeeds(wrapper.optimizer):
            return
        found = cls(wrapper)
        wrapper._muon_momentum_buffer = found._ensured
        wrapper._muon_staging_momentum = found._staged
        wrapper._commit_muon_momentum = found._committed

    @classmethod
    def of(cls, wrapper: Any) -> WholeMomentum | None:
        """The one that has taken over; None where the momentum is cut as the masters are."""
        found = getattr(getattr(wrapper, "_commit_muon_momentum", None), "__self__", None)
        return found if isinstance(found, cls) else None

    # --- what DeepSpeed calls ---

    def _ensured(self, tensors: list[torch.Tensor], number: int, dtype: torch.dtype, device: Any) -> torch.Tensor:
        """`dtype` and `device` are those of the partition's gradients; the momentum is of the matrices' gradients'."""
        gradients = self._wrapper.all_grad_tensors.get(number)
        dtype = gradients[0].dtype if gradients else dtype
        flat, state = self._flat(number), self._state(number)
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros(flat.numel(), dtype=dtype, device=device)
        elif state[MOMENTUM].dtype != dtype:
            state[MOMENTUM] = state[MOMENTUM].to(dtype)
        kept = self._shared.setdefault(number, {})
        for place, matrix in enumerate(self._matrices[number]):
            if matrix.holders:
                whole = kept.get(place)
                if whole is None:
                    whole = torch.zeros(matrix.whole, device=device)
                kept[place] = whole.to(dtype)
        found: torch.Tensor = state[MOMENTUM]
        return found

    def _staged(self, flat: torch.Tensor, number: int) -> torch.Tensor:
        """All matrices of the partition, whole and end to end: a step that is given up leaves what is kept as it is."""
        part, matrices = self._state(number)[MOMENTUM], self._matrices[number]
        size = sum(matrix.whole for matrix in matrices)
        staging = self._staging.get(number)
        if staging is None or staging.numel() != size or staging.dtype != part.dtype:
            staging = self._staging[number] = part.new_empty(_LEAD + size)[_LEAD:]
        for place, matrix, whole in self._placed(number, staging):
            kept = self._shared[number][place] if matrix.holders else part.narrow(0, matrix.offset, matrix.numel)
            whole.copy_(kept)
        return staging

    def _committed(self) -> None:
        for number, staging in self._staging.items():
            part = self._state(number)[MOMENTUM]
            for place, matrix, whole in self._placed(number, staging):
                part.narrow(0, matrix.offset, matrix.numel).copy_(whole.narrow(0, matrix.start, matrix.numel))
                if matrix.holders:
                    self._shared[number][place].copy_(whole)

    def _placed(self, number: int, staging: torch.Tensor) -> Iterator[tuple[int, _Matrix, torch.Tensor]]:
        at = 0
        for place, matrix in enumerate(self._matrices[number]):
            numel = matrix.whole
            yield place, matrix, staging.narrow(0, at, numel)
            at += numel

    # --- after a restore ---

    @torch.no_grad()
    def exchange(self) -> None:
        """Of matrices that several partitions have parts of, each gets the others' parts. Collective."""
        self._staging.clear()
        for number, matrices in self._matrices.items():
            self._shared[number] = self._exchanged(number, matrices)

    def _exchanged(self, number: int, matrices: tuple[_Matrix, ...]) -> dict[int, torch.Tensor]:
        from deepspeed import comm

        group, flat = self._wrapper.real_dp_process_group[number], self._flat(number)
        # `get`: the state is a defaultdict, and looking must not create what does not exist yet.
        part = (self._wrapper.optimizer.state.get(flat) or {}).get(MOMENTUM)
        # Before the first step there is none; a rank without matrices has none ever.
        part = torch.zeros_like(flat, dtype=torch.float32) if part is None else part.float()
        size = dist.get_world_size(group)
        sent: list[list[torch.Tensor]] = [[] for _ in range(size)]
        expected: list[list[torch.Tensor]] = [[] for _ in range(size)]
        found = {}
        for place, matrix in enumerate(matrices):
            if not matrix.holders:
                continue
            own = part.narrow(0, matrix.offset, matrix.numel)
            whole = found[place] = part.new_zeros(matrix.whole)
            whole.narrow(0, matrix.start, matrix.numel).copy_(own)
            for rank, elements in matrix.holders:
                sent[rank].append(own)
                expected[rank].append(whole[elements])
        given = [sum(each.numel() for each in tensors) for tensors in sent]
        taken = [sum(each.numel() for each in tensors) for tensors in expected]
        received = part.new_empty(sum(taken))
        buffer = torch.cat([part.new_empty(0), *(each for tensors in sent for each in tensors)])
        comm.all_to_all_single(received, buffer, output_split_sizes=taken, input_split_sizes=given, group=group)
        pieces = [each for tensors in expected for each in tensors]
        for place_of, piece in zip(pieces, received.split([each.numel() for each in pieces]), strict=True):
            place_of.copy_(piece)
        return found

    # --- where matrices lie ---

    def _matrices_of(self, number: int) -> Iterator[_Matrix]:
        wrapper, part = self._wrapper, int(self._wrapper.partition_size[number])
        rank = dist.get_rank(wrapper.real_dp_process_group[number])
        here = iter(wrapper.params_in_partition[number])
        group: list[torch.Tensor] = wrapper.round_robin_bit16_groups[number]
        for parameter, begin in zip(group, wrapper.round_robin_bit16_offsets[number], strict=True):
            parts = {
                other: slice(max(0, other * part - begin), min(parameter.numel(), (other + 1) * part - begin))
                for other in range(begin // part, (begin + parameter.numel() - 1) // part + 1)
            }
            if rank not in parts:
                continue
            if next(here, None) is not parameter:
                raise UsageError("this DeepSpeed has other parameters in a partition than release 0.19.8 would")
            own = parts.pop(rank)
            offset = begin + own.start - rank * part
            yield _Matrix(parameter.numel(), own.start, own.stop - own.start, offset, tuple(sorted(parts.items())))

    def _flat(self, number: int) -> torch.Tensor:
        flat: torch.Tensor = self._wrapper.single_partition_of_fp32_groups[number]
        return flat

    def _state(self, number: int) -> dict[str, Any]:
        state: dict[str, Any] = self._wrapper.optimizer.state[self._flat(number)]
        return state
