"""Layers that neighbouring ranks share (`mesh: {tp: N}`): DeepSpeed's AutoTP, release 0.19.8.

AutoTP replaces linear layers by this rank's slices of them, and ZeRO then partitions each slice over the ranks that
have the same one. Nothing here imports torch or DeepSpeed at the top: a job file is checked without them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from elastic.core.errors import MeshRefused, UsageError
from elastic.core.mesh import described
from elastic.engines.deepspeed.refused import refuse_zero_init
from elastic.engines.model.plain_names import named_modules
from elastic.engines.model.shared_layers import is_fused, refuse_adapters, refuse_transposed

_SECTION = "tensor_parallel"
# (key, when it is refused, why)
_REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("vocab_parallel_lm_head", bool, "losses over slices of the vocabulary are not supported; remove the key"),
    ("keep_module_on_host", bool, "it is for loading checkpoints for inference; remove the key"),
    ("replace_with_kernel_inject", bool, "its kernels are for inference; remove the key"),
    ("kernel_inject", bool, "its kernels are for inference; remove the key"),
    ("injection_policy_tuple", bool, "give partition_config, which says how each layer is sliced"),
)


def configured(config: Mapping[str, Any], tp: int) -> dict[str, Any]:
    """What of a configuration tensor parallelism sets: the section, where `tp` is above 1, with the user's
    `partition_config` or `preset_model`.

    Raises UsageError for another size than the mesh's, and for what is refused.
    """
    section = config.get(_SECTION) or {}
    inner = section.get("tp") or section.get(_SECTION) or {}
    # 0, and 1 in the older section, are DeepSpeed's own way of saying nothing.
    sizes = (("autotp_size", section.get("autotp_size"), 0), ("tp.tp_size", inner.get("tp_size"), 1))
    for path, size, nothing in sizes:
        if isinstance(size, int) and size > nothing and size != tp:
            raise UsageError(
                f"DeepSpeed option {_SECTION}.{path} is {size}, and the job's mesh says tp: {tp}; give the job's "
                f"mesh: {{tp: {size}}} alone, by which workers and samples are counted too"
            )
    if tp == 1:
        return {}
    for key, refused, why in _REFUSED:
        if refused(section.get(key)):
            raise UsageError(f"DeepSpeed option {_SECTION}.{key}: {why}")
    # Off by our word: a model may ask for it by its own plan.
    return {_SECTION: {**section, "autotp_size": tp, "vocab_parallel_lm_head": False}}


def size_of(config: Mapping[str, Any]) -> int:
    """How many ranks share each layer, by a resolved configuration."""
    return int((config.get(_SECTION) or {}).get("autotp_size") or 1)


def refuse_plan(plan: Any) -> None:
    """Raises UsageError for a plan in torch's terms, which AutoTP does not read."""
    if plan is not None:
        raise UsageError(
            "tp_plan is for engine: fsdp2; with DeepSpeed say in tensor_parallel.partition_config how layers are cut"
        )


def refuse_unshardable(model: Any, tp: int) -> None:
    """Raise UsageError for a model that AutoTP would leave as it is, or slice by groups of an earlier generation."""
    from deepspeed.runtime.tensor_parallel import init_utils

    refuse_transposed(model, tp)
    refuse_adapters(model, tp)
    if getattr(model, "ds_autotp_parsed", False):
        raise UsageError(
            "the model has been sliced by tensor parallelism before, which cannot be undone; build it anew in the "
            "training function, without elastic.keep"
        )
    refuse_zero_init(model, "mesh.tp")
    if init_utils._TP_MODEL_INIT_ARGS is not None:
        init_utils._TP_MODEL_INIT_ARGS = None
        raise UsageError(
            "deepspeed.tp_model_init was called: leave it out, elastic.initialize slices the model as mesh.tp says"
        )


def require_slices(model: Any, tp: int) -> None:
    """Raises UsageError where AutoTP has recognised no layer: all ranks of a cell would compute the same."""
    if not any(getattr(parameter, "tensor_model_parallel", False) for parameter in model.parameters()):
        raise UsageError(
            f"AutoTP has found no layer to slice in {type(model).__name__}: say in the DeepSpeed configuration how "
            f"its layers are sliced (tensor_parallel.partition_config or preset_model), or leave mesh.tp ({tp}) out"
        )


def require_heads(model: Any, tp: int) -> None:
    """Raises UsageError for a model of transformers' with fewer heads of keys and values."""
    config = getattr(model, "config", None)
    if (getattr(getattr(config, "text_config", None) or config, "num_key_value_heads", None) or tp) < tp:
        raise _left_without("its attention", tp)


def _left_without(what: str, tp: int) -> MeshRefused:
    return MeshRefused(
        f"{described(1, tp)}: AutoTP leaves a worker without any part of {what}, as it cuts between heads of keys and "
        "values (num_key_value_heads); use a tp of at most their number"
    )


def require_even_slices(model: Any, tp: int) -> None:
    """Raises UsageError, by name and on all ranks alike, for a layer of which some rank has nothing now, or all of one
    projection and nothing of another."""
    from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META

    for name, module in named_modules(model):
        for parameter in module.parameters(recurse=False):
            cut = getattr(parameter, DS_AUTOTP_UC_META, None)
            if cut is not None:
                _require_even(name, module, cut, tp)


def _require_even(name: str, module: Any, cut: Mapping[str, Any], tp: int) -> None:
    if 0 in (cut.get("partition_sizes") or ()):
        raise _left_without(repr(name), tp)
    contiguous = cut.get("partition_type") == "column" and not cut.get("sub_param_sizes")
    one_after_another = contiguous and is_fused(name) and not getattr(module, "gather_output", False)
    if one_after_another or (cut.get("conversion") or {}).get("unsupported_reason"):
        raise UsageError(
            f"{described(1, tp)}: {name!r} holds several projections, and AutoTP would give a worker the rows of one "
            "and not of another: say with `shape` in tensor_parallel.partition_config how it is made up, use a "
            "preset_model that does, or make each projection a module of its own"
        )
