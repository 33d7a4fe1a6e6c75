"""Training loops of other libraries inside of a run: refused in one sentence.

They would train as DistributedDataParallel: no step would be counted, nothing saved, and a lost node would end them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from elastic.core.errors import UsageError

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
}

# Objects with this attribute are the platform's own: a Trainer of `elastic.integrations` and what it makes.
OWN = "_is_elastic"

_refusing = False


def refuse() -> None:
    """From here on the loops of the libraries that are loaded raise UsageError."""
    global _refusing
    _refusing = True
    for (module, name, method), sentence in _REFUSED.items():
        found = getattr(sys.modules.get(module), name, None)
        if found is not None:
            _guard(found, method, sentence)


def allow() -> None:
    """Outside of a run they are what they were."""
    global _refusing
    _refusing = False


def _guard(owner: type, method: str, sentence: str) -> None:
    """Once per class: a guard stays, and asks whether a run is going on."""
    original: Callable[..., Any] = getattr(owner, method)
    if getattr(original, "_elastic_guard", False):
        return

    @functools.wraps(original)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _refusing and not getattr(self, OWN, False):
            raise UsageError(f"{sentence}; nothing was trained")
        return original(self, *args, **kwargs)

    guarded._elastic_guard = True  # type: ignore[attr-defined]
    setattr(owner, method, guarded)
