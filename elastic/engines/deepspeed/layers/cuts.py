"""How AutoTP has cut a model's parameters, by what DeepSpeed leaves on them (release 0.19.8, module_inject/layers.py:
`_set_param_uc_meta`), compared with their values before and after.

    logical_shape           as it was seen when it was cut: the weight's own, or with its rows in several dimensions
    partition_dim           of that one; None: whole on each rank
    partition_sizes         by rank; or
    sub_param_shard_widths  by sub-parameter and rank, of matrices that hold several projections
    conversion              unsupported_reason: DeepSpeed itself cannot say where the parts belong
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from elastic.core.errors import UsageError
from elastic.core.mesh import described
from elastic.core.sharding.cuts import Cut, parts_of
from elastic.engines.deepspeed.experts import placement
from elastic.engines.model.cuts import CHANGED, Whole
from elastic.engines.model.placeholders import fill_placeholders, renew_accumulator
from elastic.engines.model.plain_names import named_parameters


@contextmanager
def noting_cuts(tp: int) -> Iterator[dict[str, Cut | str]]:
    """While an engine is built whose layers `tp` ranks share: the cuts of its parameters are in what this gives then.

    They are looked at between the cut and ZeRO's partitioning, when each rank has its slices as they are. Raises
    UsageError for a parameter that each rank has whole with other values than before.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine

    found: dict[str, Cut | str] = {}
    original = DeepSpeedEngine._apply_autotp_partitioning

    def cut_and_compare(engine: Any, model: torch.nn.Module, *args: Any) -> Any:
        whole = Whole(model)
        made = original(engine, model, *args)
        found.update(_compared(model, whole, dist.get_rank() % tp, tp))
        # Experts are shared out before.
        found.update((name, cut) for name, p in named_parameters(model) if (cut := placement.cut_of(p, tp)))
        # Not before: no rank needs memory for whole layers.
        fill_placeholders(model)
        for parameter in model.parameters():
            renew_accumulator(parameter)
        return made

    DeepSpeedEngine._apply_autotp_partitioning = cut_and_compare
    try:
        yield found
    finally:
        DeepSpeedEngine._apply_autotp_partitioning = original


def _compared(model: torch.nn.Module, whole: Whole, lane: int, tp: int) -> Iterator[tuple[str, Cut | str]]:
    from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META

    for name, parameter in named_parameters(model):
        said = cut_of(getattr(parameter, DS_AUTOTP_UC_META, None) or {})
        wrong = whole.compared(name, parameter.data, said if isinstance(said, Cut) else None, lane)
        if wrong == CHANGED:
            raise UsageError(
                f"{described(1, tp)}: AutoTP has changed the values of {name!r}, which each worker has whole, as it "
                "divides a bias that is added before the workers' outputs are added up: each would take the whole "
                "bias's steps with its share of it. Make that layer without a bias, leave the layer whole "
                "(partition_type: skip in tensor_parallel.partition_config), or use engine: fsdp2"
            )
        if isinstance(said, str) or wrong is not None:
            yield name, said if isinstance(said, str) else f"{wrong} (by AutoTP)"
        elif said is not None:
            yield name, said


def cut_of(meta: Mapping[str, Any]) -> Cut | str | None:
    """What DeepSpeed says of one parameter; in words where that is not enough, None where the parameter is whole."""
    reason = (meta.get("conversion") or {}).get("unsupported_reason")
    if reason:
        return f"DeepSpeed says that {reason}"
    dim = meta.get("partition_dim")
    if meta.get("replicated") or dim is None:
        return None
    widths = meta.get("sub_param_shard_widths")
    if not widths and meta.get("partition_sizes"):
        widths = [meta["partition_sizes"]]
    logical, shape = meta.get("logical_shape"), meta.get("original_shape")
    if not widths or not logical or not shape:
        return "AutoTP does not say by parts how it is cut"
    if tuple(logical) == tuple(shape):
        return Cut(dim, tuple(shape), parts_of(1, widths))
    if dim == len(logical) - 1 and len(shape) > 1:
        # Of the inputs, which no view touches.
        return Cut(len(shape) - 1, tuple(shape), parts_of(1, widths))
    # Rows seen in several dimensions: those behind the one that is cut go along with it.
    rows = logical if len(shape) == 1 else logical[:-1]
    return Cut(0, tuple(shape), parts_of(math.prod(rows[:dim]), widths, math.prod(rows[dim + 1 :])))
