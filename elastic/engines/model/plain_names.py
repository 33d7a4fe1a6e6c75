"""Names of a model's tensors and modules, as the model has them without torch.compile and torch's checkpoint_wrapper.

Both wrap a module into another one, whose tensors are `_orig_mod.weight`, or `_checkpoint_wrapped_module.weight`. A run
may be resumed with another part wrapped, and an export is read by models that are not: saved names are those of the
plain model.

A rank may have a part of a list of modules, and the others the rest: there they have their numbers in the whole list.

Every snapshot asks for all names many times, and they hardly ever change: they are kept with the model, and made anew
where anything that they follow from is another object or has another name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary, ref

if TYPE_CHECKING:
    # What is refused is known to the command line, which loads no torch.
    import torch

_COMPILED = "_orig_mod"
# What wrappers call what is in them: torch.compile's, and that of activation checkpointing.
_WRAPPED = (_COMPILED, "_checkpoint_wrapped_module")
# Attribute of a list of modules: the number in the whole list of the first that this rank has.
FIRST = "elastic_first"
# Attribute of what stands in for a module that another rank has: that module, in a tuple, where this rank knows it.
ABSENT = "elastic_layer"
# Where a module has what it has.
_HELD = ("_modules", "_parameters", "_buffers")

T = TypeVar("T")


def named_parameters(
    module: torch.nn.Module, remove_duplicate: bool = True
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    if remove_duplicate and (known := _Names.of(module)) is not None:
        return known.parameters()
    said = _saved(module)
    return ((said(name), tensor) for name, tensor in module.named_parameters(remove_duplicate=remove_duplicate))


def named_buffers(module: torch.nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    if remove_duplicate and (known := _Names.of(module)) is not None:
        return known.buffers()
    said = _saved(module)
    return ((said(name), tensor) for name, tensor in module.named_buffers(remove_duplicate=remove_duplicate))


def named_modules(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Without the wrappers, and what stands in for modules that other ranks have."""
    if (known := _Names.of(module)) is not None:
        return known.modules()
    return _modules_of(module, _saved(module))


def modules_everywhere(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Its modules, and those of layers that this rank had or may have and does not have now."""
    for child in module.modules():
        yield child
        for layer in getattr(child, ABSENT, ()):
            yield from layer.modules()


def _modules_of(module: torch.nn.Module, said: Callable[[str], str]) -> Iterator[tuple[str, torch.nn.Module]]:
    found = ((said(name), child) for name, child in module.named_modules() if not is_wrapper(child))
    return ((name, child) for name, child in found if not getattr(child, "elastic_absent", False))


class _Names:
    """Of one module as it was. Refers to all objects weakly: what the model has dropped is not kept by its names."""

    def __init__(self, module: torch.nn.Module) -> None:
        children, said = [child for _, child in module.named_modules()], _saved(module)
        self._children = [ref(child) for child in children]
        self._parts = _parts(children)
        self._parameters = [(said(name), ref(tensor)) for name, tensor in module.named_parameters()]
        self._buffers = [(said(name), ref(tensor)) for name, tensor in module.named_buffers()]
        self._modules = [(name, ref(child)) for name, child in _modules_of(module, said)]

    @classmethod
    def of(cls, module: torch.nn.Module) -> _Names | None:
        """As they are now; None where only the module itself can say it."""
        known = _KNOWN.get(module)
        if known is None or not known._current(module):
            if not _ordinary(module, list(module.modules())):
                return None
            known = _KNOWN[module] = cls(module)
        return known

    def _current(self, module: torch.nn.Module) -> bool:
        children = [child() for child in self._children]
        # Modules may be equal that are not the same.
        if children[0] is not module or any(child is None for child in children):
            return False
        # What has gone may have left its identity to another object.
        gone = any(tensor() is None for named in (self._parameters, self._buffers) for _, tensor in named)
        return not gone and _parts(children) == self._parts

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return _alive(self._parameters)

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        return _alive(self._buffers)

    def modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        return _alive(self._modules)


_KNOWN: WeakKeyDictionary[torch.nn.Module, _Names] = WeakKeyDictionary()


def _alive(named: list[tuple[str, ref[T]]]) -> Iterator[tuple[str, T]]:
    # At once: what is given is of the moment at which the names were compared.
    return iter([(name, found) for name, each in named if (found := each()) is not None])


def _ordinary(module: torch.nn.Module, children: list[torch.nn.Module]) -> bool:
    """Are its parts, and those of its `children`, where torch's modules have them, and named as they name them?"""
    from torch.nn import Module

    names = ("named_parameters", "named_buffers", "_named_members")
    own = all(getattr(type(module), name) is getattr(Module, name) for name in names)
    return own and all(
        type(child).named_modules is Module.named_modules
        and all(isinstance(vars(child).get(held), dict) for held in _HELD)
        for child in children
    )


def _parts(children: list[Any]) -> list[object]:
    """What the names follow from: of each module its number in a list, and the names and identities of what it has."""
    found: list[object] = []
    for child in children:
        own = vars(child)
        found.append(own.get(FIRST))
        for kind in _HELD:
            if held := own[kind]:
                found.append(kind)
                found += held
                found += map(id, held.values())
    return found


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
    if not any(wrapped in name for wrapped in _WRAPPED):
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


def is_wrapper(module: torch.nn.Module) -> bool:
    return not module._modules.keys().isdisjoint(_WRAPPED)


def is_compiled(module: torch.nn.Module) -> bool:
    """Is it what torch.compile gave?"""
    return _COMPILED in module._modules


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The module itself, of one that is wrapped, maybe more than once."""
    found = next((inner for name in _WRAPPED if (inner := module._modules.get(name)) is not None), None)
    return module if found is None else unwrapped(found)
