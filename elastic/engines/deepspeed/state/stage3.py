"""Stage 3: every parameter is cut into equal parts by itself; parts lie end to end in sub-groups.

Follows deepspeed/runtime/zero/stage3.py (1210-1233: sub-groups, 1948-1956: offsets, 3560-3587: loading) and
partition_parameters.py (1778-1888), release 0.19.8.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

from elastic.core.sharding.experts import held
from elastic.core.sharding.layout import Chunk, Layout, RankLayout
from elastic.core.sharding.zero import Group, zero3_layout
from elastic.engines.deepspeed.experts.placement import is_expert
from elastic.engines.deepspeed.state.zero import ZeroState, own_numel
from elastic.engines.live_state import PARAM, Beside, Extra, Master, Weight, is_sliced, whole_buffer
from elastic.engines.model.plain_names import named_parameters


class Stage3State(ZeroState):
    """The live state of `DeepSpeedZeroOptimizer_Stage3`."""

    zero_stage = 3

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.base: torch.optim.Optimizer = engine.optimizer.optimizer

    def groups(self) -> list[list[str]]:
        found: list[list[str]] = [[] for _ in self.base.param_groups]
        for number, sub_group in enumerate(self._wrapper.fp16_groups):
            found[self._wrapper.sub_group_to_group_id[number]] += [self._names[id(p)] for p in sub_group]
        return found

    def masters(self) -> list[Master]:
        found = []
        for number, sub_group in enumerate(self._wrapper.fp16_groups):
            flat = self._wrapper.fp32_partitioned_groups_flat[number]
            chunks, offset = [], 0
            for parameter in sub_group:
                start, numel = self._slice(parameter)
                if numel > 0:
                    chunks.append(Chunk(self._names[id(parameter)], start, numel, f"sub{number}", offset))
                offset += int(parameter.partition_numel())
            group = self._wrapper.sub_group_to_group_id[number]
            names = tuple(self._names[id(parameter)] for parameter in sub_group)
            found.append(Master(f"sub{number}", group, flat, tuple(chunks), names, replicated=False))
        return found

    def frozen(self) -> list[Extra]:
        trained = {id(parameter) for sub_group in self._wrapper.fp16_groups for parameter in sub_group}
        found = []
        parameters: list[Any] = list(self.module.parameters())
        for parameter in parameters:
            start, numel = self._slice(parameter)
            if id(parameter) not in trained and numel > 0:
                name = self._names[id(parameter)]
                part = parameter.ds_tensor.data.narrow(0, 0, numel)
                found.append(Extra(PARAM, part, Chunk(name, start, numel, whole_buffer(name), 0), replicated=False))
        return found

    def weights(self) -> list[Weight]:
        """This rank's slices, and the small parameters that stay whole on every rank."""
        trained = {id(parameter) for sub_group in self._wrapper.fp16_groups for parameter in sub_group}
        found = []
        parameters: list[tuple[str, Any]] = list(named_parameters(self.module))
        for name, parameter in parameters:
            if id(parameter) not in trained:
                continue
            start, numel = self._slice(parameter)
            shared = is_expert(parameter), is_sliced(parameter)
            if numel > 0:
                found.append(Weight(name, start, parameter.ds_tensor.data.narrow(0, 0, numel), False, *shared))
            if parameter.data.numel() == own_numel(parameter):
                own = parameter.data.reshape(-1)
                found.append(Weight(name, self.first_element(parameter), own, True, *shared))
        return found

    def beside(self) -> Iterator[Beside]:
        """stage3.py: `grad_partitions_flat_buffer`; with offload_optimizer the masters keep the gradients of their
        steps, too (`initialize_optimizer_states`)."""
        sums = self._wrapper.grad_partitions_flat_buffer
        yield Beside("part", sums.device, sums.element_size())
        if self._wrapper.offload_optimizer:
            yield Beside("part", element_bytes=self._wrapper.master_weights_and_grads_dtype.itemsize)

    def frozen_also_whole(self) -> Mapping[str, torch.Tensor]:
        trained = {id(parameter) for sub_group in self._wrapper.fp16_groups for parameter in sub_group}
        parameters: list[tuple[str, Any]] = list(named_parameters(self.module))
        return {
            name: parameter.data
            for name, parameter in parameters
            if id(parameter) not in trained and parameter.data.numel() == own_numel(parameter)
        }

    def expected(self) -> RankLayout:
        groups: dict[int, tuple[list[tuple[str, int]], bool]] = {}
        for number, sub_group in enumerate(self._wrapper.fp16_groups):
            group = self._wrapper.sub_group_to_group_id[number]
            members, _ = groups.setdefault(group, ([], is_expert(sub_group[0])))
            members += [(self._names[id(parameter)], own_numel(parameter)) for parameter in sub_group]
        layout = partial(zero3_layout, sub_group_size=int(self._wrapper.sub_group_size))

        def cut(group: Group, size: int, rank: int) -> Layout:
            return layout([group], size, only=rank)

        return held(list(groups.values()), self.place, cut, "sub")

    def begin_install(self) -> None:
        # Gathered parameters would keep their old values: only partitions may be left while they are written.
        self._wrapper.checkpoint_event_prologue()

    def ranks_of_parts(self) -> Iterator[tuple[int, int]]:
        for parameter in cast(Any, self.module.parameters()):
            yield dist.get_rank(parameter.ds_process_group), self.place.among(is_expert(parameter))[0]

    def finish_install(self) -> None:
        wrapper = self._wrapper
        for number, flat in enumerate(wrapper.fp32_partitioned_groups_flat):
            weights = wrapper.fp16_partitioned_groups_flat[number]
            weights.data.copy_(flat.data)
            parts = wrapper.fp16_partitioned_groups[number]
            for part, view in zip(parts, wrapper.unflatten(weights, parts), strict=True):
                part.data = view.data
        for parameter in cast(Any, self.module.parameters()):
            # hpZ's copies of frozen ones outlive steps.
            parameter.ds_secondary_tensor = None
        # The small parameters that stay whole on every rank must not keep their old values.
        gather(wrapper.persistent_parameters)

    def _slice(self, parameter: Any) -> tuple[int, int]:
        """(first element, number of elements) that this rank holds; the number is 0 where all is padding."""
        part, numel = int(parameter.partition_numel()), own_numel(parameter)
        start = self.place.among(is_expert(parameter))[0] * part
        return self.first_element(parameter) + start, max(0, min(part, numel - start))


def gather_in_bundles(wrapper: Any) -> None:
    """What DeepSpeed gathers after each step, the small parameters that stay whole, is gathered by `gather` from now
    on."""
    small: list[Any] = wrapper.persistent_parameters
    if not small:
        return
    one_by_one = small[0].all_gather

    def all_gather(param_list: Any = None, async_op: bool = False, hierarchy: int = 0) -> Any:
        if param_list is small and not async_op:
            return gather(small)
        return one_by_one(param_list, async_op, hierarchy)

    small[0].all_gather = all_gather


def gather(parameters: Iterable[Any], numel: int = 1 << 24) -> None:
    """Make partitioned parameters whole. Collective; a collective gathers up to `numel` elements, or one parameter.

    The same as DeepSpeed's `parameter.all_gather(parameters)`, which makes a collective of each: fifty of some
    kilobytes take as long as all the rest of a restore, and a quarter of a step, where ranks share processors.
    """
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    bundles: dict[tuple[int, torch.dtype], list[Any]] = defaultdict(list)
    filled: Counter[tuple[int, torch.dtype]] = Counter()
    for parameter in parameters:
        if parameter.ds_status != ZeroParamStatus.NOT_AVAILABLE:
            continue
        if hasattr(parameter.ds_tensor, "ds_quant_scale"):
            parameter.all_gather([parameter])
            continue
        kind = (id(parameter.ds_process_group), parameter.ds_tensor.dtype)
        if filled[kind] + parameter.ds_numel > numel:
            _gather_bundle(bundles.pop(kind, []))
            del filled[kind]
        bundles[kind].append(parameter)
        filled[kind] += parameter.ds_numel
        parameter.ds_status = ZeroParamStatus.AVAILABLE
    for bundle in bundles.values():
        _gather_bundle(bundle)


def _gather_bundle(parameters: list[Any]) -> None:
    if not parameters:
        return
    from deepspeed import comm
    from deepspeed.accelerator import get_accelerator

    # Parts may lie in host memory.
    group, device = parameters[0].ds_process_group, get_accelerator().current_device_name()
    own = torch.cat([parameter.ds_tensor.data.to(device).reshape(-1) for parameter in parameters])
    parts = own.new_empty(dist.get_world_size(group), own.numel())
    comm.all_gather_into_tensor(parts.view(-1), own, group=group)
    sizes = [parameter.ds_tensor.numel() for parameter in parameters]
    for parameter, part in zip(parameters, torch.split(parts, sizes, dim=1), strict=True):
        # A copy, as each is freed by itself.
        whole = torch.empty_like(part, memory_format=torch.contiguous_format).copy_(part)
        parameter.data = whole.view(-1)[: parameter.ds_numel].view(parameter.ds_shape)
