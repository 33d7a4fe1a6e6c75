"""A run that begins has the values that its script has built, and not those that an earlier attempt has left.

A model is mostly built in the training function, anew at each call. One that a module has, or a cache, is there again
when the function is called again, with the steps of a generation that was lost before anything of it was saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
import xxhash
from torch import nn

from elastic.core.errors import UsageError
from elastic.core.generation_spec import GenerationSpec
from elastic.engines.model.plain_names import named_modules, named_parameters

# Of each tensor; an update changes nearly all of a parameter's elements.
_SAMPLED = 1024


@dataclass(frozen=True)
class _First:
    run_id: str
    generation: int
    values: dict[str, str]


_first: WeakKeyDictionary[nn.Module, _First] = WeakKeyDictionary()


def require_first_values(model: Any, spec: GenerationSpec) -> None:
    """Where a run begins: raises UsageError for a model that has other values than when it began for the first time in
    this process. Not collective."""
    if spec.checkpoint is not None or not isinstance(model, nn.Module):
        return
    named = chain(named_parameters(model), _saved_buffers(model))
    before, now = _first.get(model), {name: _sampled(tensor) for name, tensor in named}
    if before is None or before.run_id != spec.run_id or before.generation >= spec.generation:
        _first[model] = _First(spec.run_id, spec.generation, now)
        return
    changed = next((name for name in {**before.values, **now} if before.values.get(name) != now.get(name)), None)
    if changed is not None:
        raise UsageError(
            f"{changed!r} of the model is not what it was when the run began: it has been trained, or was given up, in "
            f"generation {before.generation} or later, of which nothing was saved, and the run begins again; build the "
            "model in the training function, which is called anew, and not in a module or a cache"
        )


def _saved_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Passes change them, too (batch norm). Others are caches."""
    for above, module in named_modules(model):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{above}.{name}".removeprefix("."), buffer


def _sampled(tensor: torch.Tensor) -> str:
    """Of some of its elements; a word where it has none of its own."""
    values = tensor.detach()
    if type(values) is not torch.Tensor or values.is_meta or values.layout is not torch.strided:
        return type(values).__name__
    flat = values.reshape(-1)
    some = flat[:: max(1, flat.numel() // _SAMPLED)].to("cpu", copy=True).contiguous()
    return xxhash.xxh3_64_hexdigest(some.view(torch.uint8).numpy().data) + str(tuple(values.shape))
