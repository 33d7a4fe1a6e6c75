"""DeepSpeed options that an elastic run cannot honour, or that DeepSpeed 0.19.8 no longer knows: each with its reason.

One table, so that every refusal has its reason in one place. Where the configuration is in the job file, it is checked
before any node is requested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from elastic.core.errors import UsageError
from elastic.core.policy.communication import refused_hook
from elastic.engines.model.plain_names import is_compiled
from elastic.engines.optimizer.whole_tensor import refuse_whole_tensor

_Test = Callable[[Any], bool]


def _present(_: Any) -> bool:
    return True


def _true(value: Any) -> bool:
    return bool(value)


def _above_one(value: Any) -> bool:
    return isinstance(value, (int, float)) and value > 1


def _is(*words: str) -> _Test:
    return lambda value: isinstance(value, str) and value.lower() in words


_GONE = "DeepSpeed 0.19.8 has removed it"

# DeepSpeed's default (runtime/constants.py).
_CLIPPING = 1

_QUANTIZED = (
    "its kernels are CUDA's, and what a rank computes with would depend on how weights were partitioned, and so on the "
    "world size; remove the key"
)

# (dotted path, when it is refused, the sentence: why, and what to use here)
REFUSED: tuple[tuple[str, _Test, str], ...] = (
    (
        "elasticity",
        _present,
        f"{_GONE}; ray-elastic changes the world size itself: give min and max workers in the job's scaling settings, "
        "and train_batch_size, which stays the global batch at every world size",
    ),
    ("nebula", _present, f"{_GONE}; give the job's checkpoint.url, which takes any fsspec URL"),
    ("amp", _present, f"{_GONE}; use fp16 or bf16"),
    ("compression_training", _present, f"{_GONE} and nothing here replaces it; remove the block"),
    ("quantize_training", _present, f"{_GONE} and nothing here replaces it; remove the block"),
    ("eigenvalue", _present, f"{_GONE} and nothing here replaces it; remove the block"),
    ("sparse_attention", _present, f"{_GONE}; use an attention kernel of the model's own"),
    ("sparse_gradients", _present, f"{_GONE}; an embedding made with sparse=True needs no key"),
    ("graph_harvesting", _present, f"{_GONE} and nothing here replaces it; remove the key"),
    ("curriculum_learning", _present, f"{_GONE}; order the dataset itself, the platform shuffles by seed and epoch"),
    ("progressive_layer_drop", _present, f"{_GONE} and nothing here replaces it; remove the block"),
    (
        "zero_optimization.mics_shard_size",
        _present,
        f"{_GONE}; use plain ZeRO-3, whose state is resharded here at any world size",
    ),
    ("zero_optimization.mics_hierarchical_params_gather", _present, f"{_GONE}; use plain ZeRO-3"),
    ("zero_optimization.zeropp_loco_param", _present, f"{_GONE}; remove the key"),
    (
        "zero_optimization.elastic_checkpoint",
        _true,
        "DeepSpeed cannot load such a checkpoint at another world size; checkpoints here always can be: remove the key",
    ),
    (
        "checkpoint.load_universal",
        _true,
        "universal checkpoints lose buffers, frozen parameters and parameter groups; the platform restores its own "
        "checkpoints at any world size: remove the key",
    ),
    (
        "checkpoint.writer",
        _present,
        "DeepSpeed's fast and decoupled writers cannot read back what they wrote; snapshots here are written in the "
        "background already: remove the block",
    ),
    (
        "zero_optimization.offload_optimizer.device",
        _is("nvme"),
        "state on NVMe is a folder bound to the number of ranks and cannot be resharded; use device: cpu",
    ),
    (
        "zero_optimization.offload_param.device",
        _is("nvme"),
        "parameters on NVMe are bound to the number of ranks and cannot be resharded; use device: cpu",
    ),
    (
        "zero_optimization.save_muon_momentum_buffer_in_memory",
        _true,
        "it is for optimizer state on NVMe, which cannot be resharded; remove the key",
    ),
    (
        "zero_optimization.zenflow",
        _present,
        "its optimizer runs in a process of its own whose state no snapshot can see; use plain CPU offload",
    ),
    (
        "zero_optimization.offload_optimizer.super_offload",
        _true,
        "its optimizer runs in worker processes whose state no snapshot can see; use plain CPU offload",
    ),
    (
        "zero_optimization.zero_quantized_gradients",
        _true,
        "it needs all devices of a node to be visible to every rank, a worker here sees its own only; remove the key",
    ),
    ("zero_optimization.zero_quantized_weights", _true, _QUANTIZED),
    ("zero_optimization.zero_quantized_nontrainable_weights", _true, _QUANTIZED),
    (
        "communication_data_type",
        lambda value: str(value).lower() not in ("fp32", "fp16", "bf16"),
        "DeepSpeed knows fp32, fp16 and bf16; for fewer bits give the job's "
        "communication: {semantics: error_feedback, strategy: int8} instead",
    ),
    (
        "gradient_allreduce_op",
        _is("sum"),
        "gradients here are exactly the mean over the global batch at any world size; remove the key and let the loss "
        "be the mean over the micro-batch",
    ),
    (
        "managed_gradient_accumulation",
        lambda value: value is False,
        "the platform sets the number of micro-batches per step at every world size; remove the key",
    ),
    (
        "sequence_parallel_size",
        _above_one,
        "DeepSpeed then partitions over the data-parallel ranks alone, and weights drift apart; remove the key and "
        "give the job's mesh: {sp: N}",
    ),
    ("data_parallel_size", _present, "the platform sets it at every world size; remove the key"),
    ("hybrid_engine.enabled", _true, "its inference engine is bound to one world size; remove the block"),
    ("autotuning.enabled", _true, "it ends the process by itself; tune with DeepSpeed's launcher, then run here"),
    ("compile.deepcompile", _true, "its native state is bound to the process group of one generation; remove the key"),
)

# Refused whatever their value: no suggestion for a misspelt key.
ALWAYS_REFUSED = frozenset(path for path, refused, _ in REFUSED if refused is _present)

_GONE_OPTIMIZERS = ("onebitadam", "zerooneadam", "onebitlamb")


def refuse(config: Mapping[str, Any]) -> None:
    """Raise UsageError for the first option that cannot be honoured; the message names it."""
    for path, refused, why in REFUSED:
        for value in _values(config, path.split(".")):
            if refused(value):
                raise UsageError(f"DeepSpeed option {path}: {why}")
    optimizer = config.get("optimizer")
    kind = optimizer.get("type") if isinstance(optimizer, Mapping) else None
    if not isinstance(kind, str):
        return
    if kind.lower() in _GONE_OPTIMIZERS:
        raise UsageError(f"DeepSpeed option optimizer.type {kind!r}: {_GONE}; use Adam or AdamW")
    zero = config.get("zero_optimization")
    # DeepSpeed gives its own Muon whole matrices.
    if isinstance(zero, Mapping) and zero.get("stage") in (1, 2, 3) and kind.lower() != "muon":
        refuse_whole_tensor(kind)


def refuse_in_stage0(config: Mapping[str, Any], shared: str, norm: str, instead: str) -> None:
    """Raise UsageError for what DeepSpeed does not do rightly in stage 0 where ranks hold different parts of the model
    (`shared`, of the job's mesh): clip, for it does so by `norm`, and 16 bits, whose norm is that too."""
    mesh = f"and the job's mesh says {shared}"
    if (config.get("zero_optimization") or {}).get("stage", 0) != 0:
        return
    if any((config.get(key) or {}).get("enabled") for key in ("bf16", "bfloat16", "fp16", "torch_autocast")):
        raise UsageError(
            f"DeepSpeed option zero_optimization.stage is 0 with bf16, fp16 or torch_autocast, {mesh}: this has not "
            f"been shown to be right; use {instead}"
        )
    clipping = config.get("gradient_clipping", _CLIPPING)
    if clipping:
        raise UsageError(
            f"DeepSpeed option gradient_clipping is {clipping} (1 is its default), {mesh}: in stage 0 DeepSpeed "
            f"clips by {norm}; use zero_optimization.{instead}, or gradient_clipping: 0"
        )


def refuse_model(model: Any) -> None:
    """Raise UsageError for a model that cannot be resharded. Recognised by where its classes come from, so that
    DeepSpeed need not be imported."""
    for hook, _ in getattr(model, "_comm_hooks", ()):
        name = getattr(hook, "__qualname__", type(hook).__name__).split(".")[-1]
        raise UsageError(
            refused_hook(name)
            or f"the communication hook {name} of the model's DistributedDataParallel would not be run: "
            "DeepSpeed averages gradients; pass the model itself"
        )
    if type(model).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel"):
        raise UsageError(
            f"the model is wrapped in {type(model).__name__}; pass the model itself, whose gradients DeepSpeed averages"
        )
    for module in model.modules():
        home = type(module).__module__
        if module is not model and home.startswith(("deepspeed.pipe", "deepspeed.runtime.pipe")):
            raise UsageError(
                "a pipeline module inside of another model is not supported: give the PipelineModule itself"
            )


def refuse_zero_init(model: Any, what: str) -> None:
    """Raise UsageError for a model whose parameters are partitioned already."""
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise UsageError(
            f"deepspeed.zero.Init and {what} are not supported together; build the model without it, on the CPU"
        )


def refuse_without_values(model: Any, begins: bool) -> None:
    """Raise UsageError for a model on the meta device, and where a run `begins` for one whose values were given up."""
    from elastic.engines.model.placeholders import is_placeholder

    # Under deepspeed.zero.Init parameters are placeholders with a `ds_id`.
    meta = next((name for name, p in model.named_parameters() if p.is_meta and not hasattr(p, "ds_id")), None)
    if meta is not None:
        raise UsageError(
            f"parameter {meta!r} is on the meta device and has no values: build the model on the CPU, or under "
            "deepspeed.zero.Init with stage 3"
        )
    gone = next((name for name, p in model.named_parameters() if begins and is_placeholder(p)), None)
    if gone is not None:
        raise UsageError(
            f"parameter {gone!r} has no values: they were lost with a worker while an engine was built on this model, "
            "and there is no state yet to restore; build the model anew in the training function, without elastic.keep"
        )


def refuse_wrapped(model: Any, config: Mapping[str, Any]) -> None:
    """Raise UsageError for a module that torch.compile has wrapped, where DeepSpeed cannot train it: seen with stage 3
    of 0.19.8 alone ("'dict' object has no attribute '_in_forward'")."""
    stage = config.get("zero_optimization", {}).get("stage", 0)
    found = next((name for name, module in model.named_modules() if is_compiled(module)), None)
    if stage == 3 and found is not None:
        what = f"module {found!r}" if found else "the model"
        raise UsageError(
            f"DeepSpeed's stage 3 cannot train {what} as torch.compile has wrapped it; compile it in place "
            "(model.compile()), or the engine (engine.compile())"
        )


def _values(config: Any, path: list[str]) -> Iterator[Any]:
    for key in path:
        if not isinstance(config, Mapping) or key not in config:
            return
        config = config[key]
    if config is not None:
        yield config
