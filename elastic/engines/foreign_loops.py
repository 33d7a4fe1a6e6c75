"""Training loops of other libraries inside of a run: refused in one sentence.

They would train as DistributedDataParallel: no step would be counted, nothing saved, and a lost node would end them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from elastic.core.errors import UsageError
from elastic.engines.when_imported import when_imported

# (module, class, method): what to write instead.
_REFUSED: dict[tuple[str, str, str], str] = {
    ("transformers.trainer", "Trainer", "train"): (
        "transformers.Trainer does not train elastically; write "
        "`from elastic.integrations.transformers import Trainer`, which takes the same arguments"
    ),
    ("accelerate.accelerator", "Accelerator", "prepare"): (
        "accelerate.Accelerator does not train elastically; replace `accelerator.prepare(...)` by "
        "`engine, optimizer, loader, scheduler = elastic.initialize(model=..., optimizer=..., training_data=...)`"
    ),
    ("lightning.pytorch.trainer.trainer", "Trainer", "__init__"): (
        "Lightning's Trainer does not train elastically; write the loop with elastic.initialize"
    ),
    ("pytorch_lightning.trainer.trainer", "Trainer", "__init__"): (
        "Lightning's Trainer does not train elastically; write the loop with elastic.initialize"
    ),
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "__init__"): (
        "DistributedDataParallel does not train elastically; pass the model to elastic.initialize instead of wrapping "
        "it (transformers: `from elastic.integrations.transformers import Trainer`)"
    ),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel", "__init__"): (
        "FullyShardedDataParallel does not train elastically; pass the model to elastic.initialize instead of wrapping "
        "it: ZeRO stage 3 shards it, or torch's fully_shard with the job key `engine: fsdp2`"
    ),
    ("torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState", "__init__"): (
        "fully_shard needs the job key `engine: fsdp2`, which shards the model passed to elastic.initialize, where the "
        "script has not; or leave the call out: ZeRO stage 3 shards the model, too"
    ),
}

# What the engine of that name takes from the user, or calls itself.
_TAKEN = {"fsdp2": "FSDPState"}

# Objects with this attribute are the platform's own: a Trainer of `elastic.integrations` and what it makes.
OWN = "_is_elastic"

_refusing = False
_taken: str | None = None


def refuse(engine: str) -> None:
    """From here on these loops raise UsageError, also those of libraries that the function imports. `engine` is
    the name of the run's."""
    global _refusing, _taken
    _refusing, _taken = True, _TAKEN.get(engine)
    for (module, name, method), sentence in _REFUSED.items():
        when_imported(module, functools.partial(_guard_in, name, method, sentence))


def allow() -> None:
    """Outside of a run they are what they were."""
    global _refusing
    _refusing = False


def _guard_in(name: str, method: str, sentence: str, module: Any) -> None:
    owner = getattr(module, name, None)
    if owner is not None:
        _guard(owner, method, sentence)


def _guard(owner: type, method: str, sentence: str) -> None:
    """Once per class: a guard stays, and asks whether a run is continuing."""
    original: Callable[..., Any] = getattr(owner, method)
    if getattr(original, "_elastic_guard", False):
        return

    @functools.wraps(original)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Not `getattr(self, ...)`: an object that is not made yet may look for what it wraps.
        if _refusing and owner.__name__ != _taken and not vars(self).get(OWN, getattr(type(self), OWN, False)):
            raise UsageError(f"{sentence}; nothing was trained")
        return original(self, *args, **kwargs)

    guarded._elastic_guard = True  # type: ignore[attr-defined]
    setattr(owner, method, guarded)
