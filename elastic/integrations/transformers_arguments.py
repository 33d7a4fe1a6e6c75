"""What of `transformers.TrainingArguments` and of a Trainer an elastic run honours: the rest is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from elastic.core.errors import UsageError
from elastic.core.generation_spec import GenerationSpec
from elastic.integrations.engine_config import Asked, completed

_PLATFORM = "the platform distributes the model; the job's `deepspeed` key says how"
_RESUME = "the platform saves and resumes by itself: `elastic resume RUN`"

# Argument -> (the value that asks for nothing, what to do instead).
_REFUSED: Mapping[str, tuple[Any, str]] = {
    "deepspeed": (None, 'give the DeepSpeed configuration as the job\'s `deepspeed`, without "auto"'),
    "fsdp": (None, _PLATFORM),
    "parallelism_config": (None, _PLATFORM),
    "ddp_find_unused_parameters": (None, _PLATFORM),
    "ddp_bucket_cap_mb": (None, _PLATFORM),
    "ddp_broadcast_buffers": (None, _PLATFORM),
    "ddp_static_graph": (None, _PLATFORM),
    "auto_find_batch_size": (False, "the global batch of a run is fixed; set per_device_train_batch_size"),
    "resume_from_checkpoint": (None, _RESUME),
    "push_to_hub": (False, "export the finished run (`elastic export RUN --to hf DIR`) and push that folder"),
    "dataloader_drop_last": (False, "every sample of an epoch is used once; leave it out"),
    "include_num_input_tokens_seen": ("no", "the platform counts tokens: `elastic report RUN`"),
    "enable_jit_checkpoint": (False, _RESUME),
    "fp16_full_eval": (False, "the model is evaluated in the dtype that it is trained in"),
    "bf16_full_eval": (False, "the model is evaluated in the dtype that it is trained in"),
}
# Of the schedulers, those that need a metric.
_METRIC_SCHEDULERS = ("reduce_lr_on_plateau", "greedy")
# Methods of a Trainer that the elastic loop does not call: what they change would be lost without a word.
_NOT_CALLED: Mapping[str, str] = {
    "get_train_dataloader": "pass train_dataset and data_collator",
    "_get_train_sampler": "the platform orders the samples, by the job's `seed`",
    "get_batch_samples": "override compute_loss",
}


def refuse(trainer: Any, base: type) -> None:
    """Raises UsageError with the first argument or method of `trainer` that an elastic run cannot honour."""
    for name in _not_called(type(trainer), base):
        mine = type(trainer).__name__
        raise UsageError(
            f"elastic.integrations.transformers.Trainer stands before {name} in the bases of {mine}, whose methods it "
            f"would hide; put it last: class {mine}({name}, Trainer)"
        )
    for what, instead in _refused(trainer, base):
        raise UsageError(f"elastic.integrations.transformers.Trainer: {what} is not supported; {instead}")


def refuse_mesh(own: Any, spec: GenerationSpec) -> None:
    """Raises UsageError for what ranks cannot share under this Trainer."""
    trainer = "elastic.integrations.transformers.Trainer"
    shared = max(spec.mesh.per_cell * spec.ep, *spec.tp_sizes, 1) > 1 or spec.ep_changes
    if hasattr(own, "_makes_completions") and shared:
        raise UsageError(
            "elastic.integrations.trl's Trainers and `mesh` are not supported together, which has not been run; "
            "without it each worker samples completions by itself, with ZeRO stage 3 and FSDP2 too"
        )
    refuse_axes(trainer, spec)
    of_trl = any(kind.__module__.partition(".")[0] == "trl" for kind in type(own).__mro__)
    if of_trl and spec.engine == "deepspeed" and max((spec.tp, *spec.tp_sizes)) > 1 and _head_apart(own.model):
        raise UsageError(
            f"{trainer} and mesh: {{tp: {spec.tp}}} are not supported together with DeepSpeed for this model: TRL "
            "multiplies by lm_head.weight itself, of which a rank would have a slice; take `engine: fsdp2`, whose "
            "slices TRL gathers, or a model with tied embeddings"
        )


def refuse_axes(name: str, spec: GenerationSpec) -> None:
    """Of a loop that is not written for stages of a pipeline, and uses the model's own names. Raises UsageError."""
    if spec.pp > 1:
        raise UsageError(
            f"{name} and mesh: {{pp: {spec.pp}}} are not supported together: its loop asks for the model's "
            "outputs, which the last stage alone has; call elastic.initialize with elastic.Pipeline(own_forward=True)"
        )
    if spec.engine == "deepspeed" and (spec.ep > 1 or spec.ep_changes):
        raise UsageError(
            f"{name} and mesh: {{ep: {spec.ep}}} are not supported together with DeepSpeed, whose AutoEP gives the "
            "experts other names than the model has; with `engine: fsdp2` they are"
        )


def _head_apart(model: Any) -> bool:
    """Has a language model a head with weights of its own?"""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and getattr(head, "weight", None) is not getattr(embedding, "weight", None)


def engine_config(args: Any, spec: GenerationSpec, micro_batch: int) -> dict[str, Any]:
    """The engine's configuration: the job's, and from the arguments what it leaves open. `micro_batch`: samples in
    per_device_train_batch_size. See `integrations.engine_config`."""
    prompts = "" if micro_batch == args.per_device_train_batch_size else f" ({micro_batch} prompts)"
    asked = Asked(
        micro_batch=micro_batch,
        accumulation=args.gradient_accumulation_steps,
        said_micro_batch=f"per_device_train_batch_size is {args.per_device_train_batch_size}{prompts}",
        said_accumulation=f"gradient_accumulation_steps is {args.gradient_accumulation_steps}",
        owner="TrainingArguments",
        bf16=args.bf16,
        fp16=args.fp16,
        clipping=float(args.max_grad_norm) if args.max_grad_norm else None,
    )
    return completed(asked, spec)


def compile_model(args: Any, model: Any) -> None:
    """As accelerate would; in place, so that the engine trains the module that everybody else holds."""
    if args.torch_compile:
        mode = {"mode": args.torch_compile_mode} if args.torch_compile_mode else {}
        model.compile(backend=args.torch_compile_backend or "inductor", **mode)


def _refused(trainer: Any, base: type) -> Iterator[tuple[str, str]]:
    args = trainer.args
    for name, (nothing, instead) in _REFUSED.items():
        if getattr(args, name, nothing) not in (nothing, None, [], ""):
            yield f"TrainingArguments.{name}", instead
    if str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)) in _METRIC_SCHEDULERS:
        yield f"lr_scheduler_type={args.lr_scheduler_type}", "take a schedule that depends on the step alone"
    if str(getattr(args, "train_sampling_strategy", "random")) not in ("random", "sequential"):
        yield f"train_sampling_strategy={args.train_sampling_strategy}", "the platform orders the samples"
    own_completions = hasattr(trainer, "_makes_completions")
    if getattr(trainer, "loss_is_scaled_for_ga", None) and not own_completions:
        yield "loss_is_scaled_for_ga", "compute_loss returns the mean over the micro-batch"
    if hasattr(trainer, "_generate_and_score_completions") and not own_completions:
        yield "a Trainer that makes completions", "take GRPOTrainer or RLOOTrainer of elastic.integrations.trl"
    for name, instead in _NOT_CALLED.items():
        if _overridden(trainer, base, name):
            yield f"an override of {name}", instead


def _not_called(kind: type, base: type) -> Iterator[str]:
    """Classes that come after `base`, and before transformers' own."""
    order = kind.__mro__
    for each in order[order.index(base) + 1 : order.index(base.__bases__[0])]:
        yield each.__name__


def _overridden(trainer: Any, base: type, name: str) -> bool:
    ours: Callable[..., Any] | None = getattr(base, name, None)
    return getattr(type(trainer), name, None) is not ours
