"""Names of a model's tensors and modules, as the model has them without torch.compile.

`torch.compile(module)` wraps a module into another one, whose tensors are `_orig_mod.weight`. A run may be resumed with
another part compiled, and an export is read by models that are not: saved names are those of the plain model.

A rank may have a part of a list of modules, and the others the rest: there they have their numbers in the whole list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # What is refused is known to the command line, which loads no torch.
    import torch

_WRAPPED = "_orig_mod"
# Attribute of a list of modules: the number in the whole list of the first that this rank has.
FIRST = "elastic_first"


def named_parameters(
    module: torch.nn.Module, remove_duplicate: bool = True
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    said = _saved(module)
    return ((said(name), tensor) for name, tensor in module.named_parameters(remove_duplicate=remove_duplicate))


def named_buffers(module: torch.nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    said = _saved(module)
    return ((said(name), tensor) for name, tensor in module.named_buffers(remove_duplicate=remove_duplicate))


def named_modules(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Without the wrappers, and what stands in for modules that other ranks have."""
    said = _saved(module)
    found = ((said(name), child) for name, child in module.named_modules() if not is_wrapper(child))
    return ((name, child) for name, child in found if not getattr(child, "elastic_absent", False))


def _saved(module: torch.nn.Module) -> Callable[[str], str]:
    firsts = {f"{name}.": getattr(child, FIRST, 0) for name, child in module.named_modules()}
    lists = {prefix: first for prefix, first in firsts.items() if first}

    def said(name: str) -> str:
        for prefix, first in lists.items():
            if name.startswith(prefix):
                number, dot, rest = name.removeprefix(prefix).partition(".")
                name = f"{prefix}{int(number) + first}{dot}{rest}"
                break
        return plain(name)

    return said if lists else plain


def plain(name: str) -> str:
    """`_orig_mod.layers.0._orig_mod.weight` -> `layers.0.weight`."""
    return ".".join(part for part in name.split(".") if part != _WRAPPED) if _WRAPPED in name else name


def is_wrapper(module: torch.nn.Module) -> bool:
    return _WRAPPED in module._modules


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The module itself, of one that torch.compile gave."""
    return module._modules[_WRAPPED] or module if is_wrapper(module) else module
