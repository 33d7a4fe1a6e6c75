"""Which of a layer's experts a rank has, as DeepSpeed says it of each parameter.

AutoEP packs a layer's experts into three tensors, [experts, ...]; a rank has some of the first dimension's indices
(deepspeed/module_inject/auto_ep_layer.py, `GroupedExperts`). Neighbouring ones are an interval of the whole tensor.

Where ranks share layers, too, in `lanes` slices, they divide the experts further: neighbouring ranks have different
ones, whichever axis they are neighbours along (auto_ep_folding.py, `expected_folding_group_tables`). So each lane has
blocks of them, one for each of the ranks of it that share experts, and they are counted by lane like slices.
"""

from __future__ import annotations

import math
from typing import Any

import torch.distributed as dist
from torch import nn

from elastic.core.errors import UsageError
from elastic.core.sharding.cuts import Cut, parts_of
from elastic.engines.deepspeed.refused import refuse_zero_init

# deepspeed/checkpoint/constants.py, DS_AUTOEP_UC_META.
_META = "ds_autoep_uc_meta"


def is_expert(parameter: Any) -> bool:
    """Is it shared over the data-parallel ranks with the same experts only?"""
    return getattr(parameter, "allreduce", True) is False


def is_repeated(parameter: Any) -> bool:
    """Has each of the ranks that share layers all of it, and all of its gradient after the backward pass? Experts and
    their gate have parts of theirs, which DeepSpeed adds up (auto_ep_folding.py)."""
    sliced = getattr(parameter, "tensor_model_parallel", False)
    return not (sliced or is_expert(parameter) or hasattr(parameter, "ds_autoep_folding_param_family"))


def whole_shape(parameter: Any, lanes: int = 1) -> tuple[int, ...] | None:
    """With the experts of all ranks of a lane; None where the parameter is none of AutoEP's."""
    meta = getattr(parameter, _META, None)
    if meta is None:
        return None
    number, *shape = meta["logical_shape"]
    return (number // lanes, *shape)


def cut_of(parameter: Any, lanes: int) -> Cut | None:
    """Which experts each lane has; None where the parameter is none of AutoEP's."""
    meta = getattr(parameter, _META, None)
    if meta is None:
        return None
    number, own = meta["logical_shape"][0], len(meta["local_experts"])
    return Cut(0, tuple(meta["logical_shape"]), parts_of(number // (own * lanes), [[own] * lanes]))


def first_element(parameter: Any, lanes: int = 1) -> int:
    """Where in its lane's tensor this rank's experts begin. Raises UsageError where they are not neighbours."""
    meta = getattr(parameter, _META, None)
    if meta is None:
        return 0
    own = list(meta["local_experts"])
    if own != list(range(own[0], own[0] + len(own))) or own[0] % len(own):
        raise UsageError(f"DeepSpeed gives this rank the experts {own}, which are not neighbours")
    return int(own[0] // len(own) // lanes * len(own) * math.prod(meta["logical_shape"][1:]))


def first_by_group(parameter: Any, lanes: int = 1) -> int:
    """The same, from this rank's place among those that share the experts, and from how many elements it holds."""
    if not is_expert(parameter) or not hasattr(parameter, _META):
        return 0
    from deepspeed.utils import groups

    held = int(getattr(parameter, "ds_numel", parameter.numel()))
    return dist.get_rank(groups._get_expert_parallel_group(parameter.group_name)) // lanes * held


def make_groups(ep: int, sp: int) -> None:
    """Before DeepSpeed makes those of `ep` ranks that share experts itself, which it does not where there are any: of
    ranks with the same one of `sp` parts of their sequences, as where so many share each layer in its own layers of
    experts (deepspeed/utils/groups.py, `_create_expert_and_data_parallel`). Collective."""
    from deepspeed.utils import groups

    groups._create_expert_and_data_parallel(ep, mp_size=sp, mp_mode="tp")


def copies_group(engine: Any) -> dist.ProcessGroup | None:
    """The ranks with the same experts as this one; None where there are none, or all ranks have them."""
    named = next((p.group_name for p in engine.module.parameters() if is_expert(p)), None)
    if named is None:
        return None
    group: dist.ProcessGroup = engine.expert_data_parallel_group[named]
    return None if dist.get_world_size(group) == dist.get_world_size() else group


def is_replaced(model: nn.Module) -> bool:
    """Has AutoEP been here?"""
    return any(getattr(module, "_is_autoep_layer", False) for module in model.modules())


def refuse_unplaceable(model: nn.Module) -> None:
    """Raise UsageError for a model in which AutoEP would leave experts of an earlier generation, or lose values."""
    if is_replaced(model):
        raise UsageError(
            "the model's experts have been shared out before, which cannot be undone; build the model anew in the "
            "training function, without elastic.keep"
        )
    refuse_zero_init(model, "expert_parallel")


def require_experts(module: nn.Module) -> None:
    """Raises UsageError where AutoEP has found no experts, or such as no shard would hold."""
    if not is_replaced(module):
        raise UsageError(
            f"AutoEP has found no layer with experts in {type(module).__name__}: say in the DeepSpeed configuration "
            "where they are (expert_parallel.preset_model, or moe_layer_pattern and the other patterns), or leave "
            "mesh.ep and expert_parallel out"
        )
    frozen = [name for name, p in module.named_parameters() if is_expert(p) and not p.requires_grad]
    if frozen:
        raise UsageError(
            f"{frozen[0]} is frozen ({len(frozen)} such parameters), and experts that are not trained are not "
            "supported: train them, or leave mesh.ep and expert_parallel out"
        )
