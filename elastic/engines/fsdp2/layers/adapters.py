"""PEFT's adapters on layers that ranks share: what a plan says of the layer holds for the one that they wrap.

LoRA adds B(A(x)) to a layer's output. Of a layer that is cut by columns (of its output) B is cut as it is, and A is
whole; of one that is cut by rows A is, and B is whole. Nothing of PEFT is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

from elastic.core.errors import UsageError


def base_of(model: nn.Module) -> nn.Module:
    """The model that adapters were put on; the model itself without any."""
    found = getattr(model, "get_base_model", None)
    return found() if callable(found) else model


def parts(name: str, style: ParallelStyle, modules: Mapping[str, Any]) -> Iterator[tuple[str, ParallelStyle]]:
    """What `style` says of the module `name`, module by module of those that it is made of. Raises UsageError for
    adapters that cannot be cut with it."""
    module = modules[name]
    if _is_trained_copy(module):
        yield f"{name}.original_module", style
        yield from ((f"{name}.modules_to_save.{copy}", style) for copy in module.modules_to_save)
        return
    if not hasattr(module, "base_layer"):
        yield name, style
        return
    if not hasattr(module, "lora_A") or module.lora_embedding_A or any(module.use_dora.values()):
        raise UsageError(
            f"tp_plan: {name!r} has an adapter of PEFT ({type(module).__name__}) that cannot be cut with the layer: "
            "LoRA on linear layers can, without DoRA; leave the layer out of the adapter's target_modules"
        )
    yield f"{name}.base_layer", style
    adapted = {ColwiseParallel: "lora_B", RowwiseParallel: "lora_A"}.get(type(style))
    if adapted is not None:
        yield from ((f"{name}.{adapted}.{adapter}", style) for adapter in getattr(module, adapted))


def _is_trained_copy(module: Any) -> bool:
    """Does it hold a layer beside a copy of it that is trained in its place?"""
    return hasattr(module, "original_module") and isinstance(getattr(module, "modules_to_save", None), nn.ModuleDict)
