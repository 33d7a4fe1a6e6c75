"""Training loops of other libraries inside of a run: refused in one sentence.

They would train as DistributedDataParallel: no step would be counted, nothing saved, and a lost node would end them.
Calls of theirs that the platform can honour are answered by it.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from elastic.core.errors import UsageError
from elastic.engines.when_imported import when_imported

# Module, class, method.
_Call = tuple[str, str, str]

# What to write instead.
_REFUSED: dict[_Call, str] = {
    ("transformers.trainer", "Trainer", "train"): (
        "transformers.Trainer does not train elastically; write "
        "`from elastic.integrations.transformers import Trainer`, which takes the same arguments"
    ),
    ("accelerate.accelerator", "Accelerator", "prepare"): (
        "accelerate.Accelerator does not train elastically; write `from elastic.integrations.accelerate import "
        "Accelerator`, with which the loop stays as it is; accelerate's own may prepare a DataLoader for evaluation"
    ),
    ("accelerate.local_sgd", "LocalSGD", "__init__"): (
        "accelerate's LocalSGD would average weights that are equal already, as gradients are averaged in each step; "
        "leave it out, and write `communication: {semantics: local}` into the job"
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

_answers: dict[_Call, Callable[..., Any]] = {}
_refusing = False
_taken: str | None = None


def answer(module: str, name: str, method: str, answered: Callable[..., Any]) -> None:
    """Inside of a run the method is `answered`, with the same arguments."""
    _answers[module, name, method] = answered


def refuse(engine: str) -> None:
    """From here on these loops raise UsageError, also those of libraries that the function imports. `engine` is
    the name of the run's."""
    global _refusing, _taken
    _refusing, _taken = True, _TAKEN.get(engine)
    guards: defaultdict[str, list[tuple[str, str, Callable[..., Any]]]] = defaultdict(list)
    for (module, name, method), sentence in _REFUSED.items():
        guards[module].append((name, method, functools.partial(_refused, sentence)))
    for (module, name, method), answered in _answers.items():
        guards[module].append((name, method, answered))
    for module, found in guards.items():
        when_imported(module, functools.partial(_guard_in, found))


def allow() -> None:
    """Outside of a run they are what they were."""
    global _refusing
    _refusing = False


def _refused(sentence: str, *_: Any, **__: Any) -> Any:
    raise UsageError(f"{sentence}; nothing was trained")


def _guard_in(guards: list[tuple[str, str, Callable[..., Any]]], module: Any) -> None:
    for name, method, answered in guards:
        owner = getattr(module, name, None)
        if owner is not None and hasattr(owner, method):
            _guard(owner, method, answered)


def _guard(owner: type, method: str, answered: Callable[..., Any]) -> None:
    """Once per class: a guard stays, and asks whether a run is continuing."""
    original: Callable[..., Any] = getattr(owner, method)
    if getattr(original, "_elastic_guard", False):
        return

    @functools.wraps(original)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Not `getattr(self, ...)`: an object that is not made yet may look for what it wraps.
        own = vars(self).get(OWN, getattr(type(self), OWN, False))
        if _refusing and owner.__name__ != _taken and not own and not _evaluates(method, args):
            return answered(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    guarded._elastic_guard = True  # type: ignore[attr-defined]
    setattr(owner, method, guarded)


def _evaluates(method: str, args: tuple[Any, ...]) -> bool:
    """accelerate shares the data of an evaluation out among the ranks, and so counts each sample once. That of the
    training, elastic.initialize refuses by name."""
    return method == "prepare" and bool(args) and all(isinstance(each, DataLoader) for each in args)
