"""The options of the FSDP2 engine, resolved for one world size. Pure, but for reading the file of a path."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from elastic.core.data.micro_batches import micro_steps_per_rank
from elastic.core.errors import UsageError
from elastic.core.generation_spec import BatchSettings
from elastic.core.mesh import described
from elastic.engines.base import Config, ResolvedConfig
from elastic.engines.config_file import read_mapping

# fp16 needs a loss scaler, which this engine does not have.
DTYPES = ("float32", "bfloat16")
# torch's names: of schedules for one stage per rank, for several, and for two of which the second come in the opposite
# order of the ranks.
SINGLE, LOOPED = ("1F1B", "GPipe"), ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
BACK = ("ZBVZeroBubble", "DualPipeV")
SCHEDULES = (*SINGLE, *LOOPED, *BACK)
# Which compute gradients of weights later than those of inputs. Between the two torch looks for the weights that a
# module has: a layer that is sharded then would get none.
WEIGHTS_LATER = ("InterleavedZeroBubble", *BACK)
# As torchtitan has it.
_STAGES_PER_RANK = 2


@dataclass(frozen=True)
class Options:
    """What a job's `fsdp2` or the `config` of `elastic.initialize` may say.

    `global_batch`, `micro_batch`: in samples; the job's own come first. `gradient_clipping`: the largest L2 norm of the
    whole gradient, 0 for none. `param_dtype`, `reduce_dtype`: what forward and backward compute in and what gradients
    are reduced in, as of torch's MixedPrecisionPolicy; None for the parameters' own. `output_dtype`: what the model
    gives; None: what it has computed. `cast_forward_inputs`: sharded modules cast what they are given. `shard`: class
    names of modules that are sharded (and gathered) each by itself; None: those that the model names
    (`_no_split_modules`), else the elements of its ModuleLists and numbered ModuleDicts. `reshard_after_forward`: free
    the gathered parameters of these between forward and backward. `shard_workers`: so many neighbouring workers have
    the model once between them, or with a pipeline so many of a stage its layers, and every such group has it (torch's
    HSDP); where there are other than several whole groups all are one, as with None. `cpu_offload`: shards, gradients
    and optimizer states lie in host memory. `optimizer`: {"type": a class of torch.optim, "params": its arguments}, for
    scripts that pass no optimizer. `pipeline_schedule`: in which order the stages of a pipeline compute a step's
    micro-batches. `pipeline_stages_per_rank`: how many each rank has, in a schedule for several; None: what is usual
    with the schedule.
    """

    global_batch: int | None = None
    micro_batch: int | None = None
    gradient_clipping: float = 0.0
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    output_dtype: str | None = None
    cast_forward_inputs: bool = True
    shard: tuple[str, ...] | None = None
    reshard_after_forward: bool = True
    shard_workers: int | None = None
    cpu_offload: bool = False
    optimizer: Mapping[str, Any] | None = None
    pipeline_schedule: str = "1F1B"
    pipeline_stages_per_rank: int | None = None

    @property
    def stages_per_rank(self) -> int:
        usual = 1 if self.pipeline_schedule in SINGLE else _STAGES_PER_RANK
        return self.pipeline_stages_per_rank or usual


def read_options(config: Config) -> Options:
    """Raises UsageError naming the first option that is unknown or has a value that it cannot have."""
    given = read_mapping(config, "fsdp2 configuration")
    known = {field.name for field in fields(Options)}
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            raise UsageError(f"fsdp2: unknown option {name!r}{f', did you mean {near[0]!r}?' if near else ''}")
        if value is not None and not _VALID[name](value):
            raise UsageError(f"fsdp2: {name} must be {_MEANT[name]}, got {value!r}")
    values = {name: value for name, value in given.items() if value is not None}
    if "shard" in values:
        values["shard"] = tuple(values["shard"])
    options = Options(**values)
    _refuse_schedule(options)
    return options


def _refuse_schedule(options: Options) -> None:
    name, stages = options.pipeline_schedule, options.stages_per_rank
    if (stages == 1) != (name in SINGLE) or (stages > 2 and name in BACK):
        raise UsageError(
            f"fsdp2: pipeline_schedule {name} and pipeline_stages_per_rank {stages} do not go together: "
            f"{' and '.join(SINGLE)} are for one stage per rank, {' and '.join(BACK)} for two, {', '.join(LOOPED)} "
            "for several"
        )
    if name in WEIGHTS_LATER and options.reshard_after_forward:
        raise UsageError(
            f"fsdp2: pipeline_schedule {name} needs reshard_after_forward: false, as it uses a layer's weights three "
            "times for each micro-batch"
        )


def refuse_copies(options: Options, tp: int, ep: int, sp: int = 1) -> None:
    """Raises UsageError for copies of shards of other than several whole slices of each layer, or of other than all
    experts as often as each other."""
    workers = options.shard_workers
    if workers is not None and tp > 1 and (workers % tp or workers == tp):
        raise UsageError(
            f"fsdp2: shard_workers is {workers}, and {described(1, tp)} makes cells of {tp} workers: give several "
            "whole cells"
        )
    cell = sp * tp * ep
    if workers is not None and ep > 1 and workers % cell:
        raise UsageError(
            f"fsdp2: shard_workers is {workers}, and {described(sp, tp, ep)} makes cells of {cell} workers, which have "
            "all experts of a layer: give whole cells"
        )


def check(
    config: Mapping[str, Any], batch: BatchSettings, workers: tuple[int, int], tp: int = 1, ep: int = 1, pp: int = 1
) -> None:
    """Batch sizes that are missing may still be given in the user's function, and how layers are cut where `tp` ranks
    share each, or `pp` all of them. Raises UsageError."""
    options = read_options(config)
    refuse_copies(options, tp, ep)
    if None not in (batch.micro_batch or options.micro_batch, batch.global_batch or options.global_batch):
        resolve(options, batch, workers[0])


def resolve(
    options: Options,
    batch: BatchSettings,
    world_size: int,
    loader_batch: int | None = None,
    max_world_size: int | None = None,
) -> ResolvedConfig:
    """The batch sizes for `world_size`, of at most `max_world_size` (None: as many). `loader_batch`: the batch size of
    a DataLoader that was taken over.

    Raises UsageError for sizes that are missing or contradict one another.
    """
    micro = _once("micro_batch", batch.micro_batch, options.micro_batch, loader_batch)
    total = _once("global_batch", batch.global_batch, options.global_batch)
    if total is None:
        raise UsageError("no batch size: give the job's `global_batch`, or global_batch in the fsdp2 options")
    if micro is None:
        raise UsageError("no micro-batch: give the job's `micro_batch`, or micro_batch in the fsdp2 options")
    if micro > total:
        raise UsageError(f"the micro-batch of {micro} samples is larger than the global batch of {total}")
    native, full = {field.name: getattr(options, field.name) for field in fields(Options)}, total
    native["pipeline_stages_per_rank"] = options.stages_per_rank
    if batch.adaptive is not None:
        total = batch.adaptive.batch(full, micro, world_size, max_world_size or world_size)
    return ResolvedConfig(native, total, micro, micro_steps_per_rank(total, micro, world_size), full_batch=full)


def _once(name: str, *given: int | None) -> int | None:
    found = {value for value in given if value is not None}
    if len(found) > 1:
        raise UsageError(f"{name} is given as {' and as '.join(str(value) for value in sorted(found))}; give one")
    return next(iter(found), None)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_norm(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0.0 <= value < float("inf")


def _is_names(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value)


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("type"), str) and set(value) <= {"type", "params"}


_COUNT: tuple[Callable[[Any], bool], str] = (_is_count, "a whole number of samples, at least 1")
_DTYPE: tuple[Callable[[Any], bool], str] = (
    lambda value: value in DTYPES,
    " or ".join(DTYPES) + " (float16 needs a loss scaler, which this engine does not have)",
)
_SWITCH: tuple[Callable[[Any], bool], str] = (lambda value: isinstance(value, bool), "true or false")
_RULES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "global_batch": _COUNT,
    "micro_batch": _COUNT,
    "gradient_clipping": (_is_norm, "a number, 0 for none"),
    "param_dtype": _DTYPE,
    "reduce_dtype": _DTYPE,
    "output_dtype": _DTYPE,
    "cast_forward_inputs": _SWITCH,
    "shard": (_is_names, "a list of class names"),
    "reshard_after_forward": _SWITCH,
    "shard_workers": (lambda value: _is_count(value) and value > 1, "a whole number of workers, at least 2"),
    "cpu_offload": _SWITCH,
    "optimizer": (_is_optimizer, '{"type": CLASS, "params": {...}}'),
    "pipeline_schedule": (lambda value: value in SCHEDULES, " or ".join(SCHEDULES)),
    "pipeline_stages_per_rank": (_is_count, "a whole number of stages, at least 1"),
}
_VALID = {name: valid for name, (valid, _) in _RULES.items()}
_MEANT = {name: meant for name, (_, meant) in _RULES.items()}
