"""Modules that DeepSpeed makes in the places of a model's own: AutoTP for layers of which each rank has a slice, AutoEP
for layers of experts of which each has some (release 0.19.8).

They are taken out when a generation ends, and the model's own come back. DeepSpeed makes others with the next engine;
what these have then goes into those of before: a loop may hold one, or a parameter of it, or have put hooks on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from elastic.core.errors import UsageError
from elastic.engines.model.placeholders import fill_placeholders, placeholder, renew_accumulator

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOK_OPTIONS = ("_with_kwargs", "_always_called")
# Attributes that DeepSpeed sets only after an engine is built, besides those that begin with `ds_`.
_SET_LATER = frozenset(
    {"_hp_mapping", "_external_params", "_last_folding_dispatch_counters", "_original_parameters", "_z3_optimizer",
     "all_parameters", "applied_pre_backward_ref_cnt", "grad_accum", "is_external_param", "post_bwd_fn", "pre_bwd_fn"}
)  # fmt: skip
# By which transformers collects what layers put out, put on where it finds none.
_OF_TRANSFORMERS = "output_capturing_hook"
_REPLACING = ("_configure_expert_parallel", "_apply_autotp_partitioning")
_MODULES, _PARAMETERS, _PLAIN = "_modules", "_parameters", "__dict__"
_EVERY_MODULES = frozenset(vars(nn.Module()))

# Between two generations: for a module of a model what DeepSpeed has made in its place.
_made: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()


@dataclass(frozen=True)
class _Place:
    """One name in a module's dictionary of modules, of parameters, or of plain attributes, and what is there."""

    owner: nn.Module
    among: str
    name: str
    value: Any

    @property
    def now(self) -> Any:
        return _dictionary(self.owner, self.among).get(self.name)

    def put(self) -> None:
        _dictionary(self.owner, self.among)[self.name] = self.value


@dataclass(frozen=True)
class Additions:
    """What a module or a parameter has besides: names of attributes, and numbers of hooks."""

    names: frozenset[str] = frozenset()
    hooks: frozenset[int] = frozenset()

    @classmethod
    def of(cls, owner: Any) -> Additions:
        return cls(frozenset(vars(owner)) - _EVERY_MODULES, hooks_of(owner))

    def __bool__(self) -> bool:
        return bool(self.names or self.hooks)

    def __sub__(self, other: Additions) -> Additions:
        return Additions(self.names - other.names, self.hooks - other.hooks)


class Replaced:
    """Which modules, parameters and numbers a model is made of, and what DeepSpeed puts into their places.

    Call order: 1. made before the engine is built 2. `keeping_objects` while it is 3. `require_kept`, `built` after it
    4. `obstacle`, then `give_back`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules, self._parameters = list(model.modules()), list(model.parameters())
        self._before = [place for module in self._modules for place in _places(module)]
        # What was there and what is there instead.
        self._taken: list[tuple[_Place, _Place]] = []
        # Of DeepSpeed's modules and their parameters: what the script had put on them before this engine, by id; and
        # what they had when it was built.
        self._scripts: dict[int, Additions] = {}
        self._built: list[tuple[Any, Additions]] = []
        # What DeepSpeed's modules are made of, by the id of what is in the place of one of the model's.
        self._parts: dict[int, list[Any]] = {}

    @contextmanager
    def keeping_objects(self) -> Iterator[None]:
        """While DeepSpeed builds an engine on the model."""
        from deepspeed.runtime.engine import DeepSpeedEngine

        originals = {name: getattr(DeepSpeedEngine, name) for name in _REPLACING}
        for name, original in originals.items():
            setattr(DeepSpeedEngine, name, self._keeping(original))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(DeepSpeedEngine, name, original)

    def require_kept(self) -> None:
        """Raises UsageError where the script has put something on a module of DeepSpeed's that this engine lacks."""
        for module in self._modules:
            made = _made.pop(module, None)
            if made is not None and any(Additions.of(each) for each in made.modules()):
                raise UsageError(
                    f"hooks or attributes were put on a {type(made).__name__}, which DeepSpeed had made in the place "
                    f"of a {type(module).__name__}, and does not make for this generation's mesh"
                )

    def built(self) -> None:
        unlike = [place for place in self._before if place.now is not place.value]
        self._taken = [(place, _Place(place.owner, place.among, place.name, place.now)) for place in unlike]
        self._parts = {id(after.value): _parts_of(after.value) for _, after in self._taken if after.among == _MODULES}
        own, live = {id(module) for module in self._modules}, {id(each) for each in self._model.parameters()}
        foreign = [module for module in self._model.modules() if id(module) not in own]
        self._built = [(module, Additions.of(module)) for module in foreign]
        own = {id(parameter) for parameter in self._parameters}
        made = {id(each): each for module in foreign for each in module.parameters(False) if id(each) not in own}
        self._built += [(parameter, Additions.of(parameter)) for parameter in made.values()]
        for parameter in self._parameters:
            if id(parameter) not in live:
                # Whole experts, of which this rank has some: they would stay in memory.
                parameter.data = placeholder(parameter, parameter.shape)

    def obstacle(self) -> str | None:
        """Why what is in the model now cannot be taken out of it again; None where it can."""
        for _, after in self._taken:
            if after.among != _MODULES:
                continue
            if after.now is not after.value:
                return f"the model has another {after.name!r} than the one that DeepSpeed has made for it"
            if _parts_of(after.value) != self._parts[id(after.value)]:
                return f"the model has other parts in {after.name!r} than those that DeepSpeed has made for it"
        return None

    def give_back(self) -> None:
        for before, after in self._taken:
            if after.now is not after.value:
                # A number that the script has changed since.
                continue
            before.put()
            if isinstance(before.value, nn.Module) and isinstance(after.value, nn.Module):
                # What the loop has said of the whole model since.
                before.value.train(after.value.training)
                _made[before.value] = after.value
        for owner, then in self._built:
            self._strip(owner, then - self._scripts.get(id(owner), Additions()))
        self._built.clear()

    def _strip(self, owner: Any, of_deepspeed: Additions) -> None:
        """What is left is the script's: of a group or a shard nothing is."""
        if isinstance(owner, nn.Module):
            owner._parameters = dict(owner._parameters.items())
            transformers = {
                number for number, hook in _hooks(owner) if getattr(hook, "__name__", "") == _OF_TRANSFORMERS
            }
            remove_hooks(owner, of_deepspeed.hooks | transformers)
        else:
            owner.grad = None
            remove_hooks(owner, of_deepspeed.hooks)
            owner.data = torch.empty(0, dtype=owner.dtype, device=owner.device)
        for name in [*vars(owner)]:
            if name in of_deepspeed.names or (name not in _EVERY_MODULES and is_set_later(name)):
                del vars(owner)[name]

    def _keeping(self, replace: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(replace)
        def replace_and_keep(engine: Any, model: nn.Module, *args: Any, **named: Any) -> Any:
            places = [place for module in [*model.modules()] for place in _places(module) if place.among == _MODULES]
            sources = replace(engine, model, *args, **named)
            kept: dict[int, nn.Module] = {}
            for place in places:
                if isinstance(place.now, nn.Module) and place.now is not place.value:
                    self._keep(place, getattr(sources, "sources", {}), kept)
            if engine.autotp_size() <= 1:
                # Not before: no rank needs memory for all experts.
                fill_placeholders(model)
            return sources

        return replace_and_keep

    def _keep(self, place: _Place, sources: dict[int, Any], kept: dict[int, nn.Module]) -> None:
        """`sources`: of DeepSpeed's new parameters the ones that they were made of, by id. `kept`: by the id of what
        DeepSpeed has made, for other places of the same."""
        fresh = place.now
        if id(fresh) not in kept:
            before = _made.get(place.value)
            if before is None or not _alike(before, fresh):
                return
            del _made[place.value]
            pairs = [*zip(before.modules(), fresh.modules(), strict=True)]
            counterparts = {id(new): old for old, new in pairs}
            for old, new in pairs:
                if old is not new:
                    self._fill(old, new, counterparts, sources)
            kept[id(fresh)] = before
        _Place(place.owner, place.among, place.name, kept[id(fresh)]).put()

    def _fill(
        self, old: nn.Module, new: nn.Module, counterparts: Mapping[int, nn.Module], sources: dict[int, Any]
    ) -> None:
        """All that `new` has into `old`."""
        self._scripts[id(old)] = Additions.of(old)
        own = vars(old)
        for key, value in vars(new).items():
            if key == _MODULES:
                own[key] = {name: counterparts.get(id(child), child) for name, child in value.items()}
            elif key == _PARAMETERS:
                own[key] = {name: self._filled(own[key].get(name), each, sources) for name, each in value.items()}
            elif key in _EVERY_MODULES and "hooks" in key:
                own[key].update(value)
            elif key not in ("training", "_is_full_backward_hook"):
                own[key] = value

    def _filled(self, old: Any, new: Any, sources: dict[int, Any]) -> Any:
        if old is None or new is None or old is new:
            return new
        self._scripts[id(old)] = Additions.of(old)
        old.data = new.data
        renew_accumulator(old)
        vars(old).update(vars(new))
        if id(new) in sources:
            sources[id(old)] = sources.pop(id(new))
        return old


def hooks_of(owner: Any) -> frozenset[int]:
    """Numbers of the hooks on a module, or on a parameter."""
    return frozenset(number for number, _ in _hooks(owner))


def remove_hooks(owner: Any, numbers: frozenset[int] | set[int]) -> None:
    for table in _tables(owner):
        for number in numbers & table.keys():
            del table[number]
    if isinstance(owner, nn.Module):
        for name in HOOKS:
            for option in _HOOK_OPTIONS:
                for number in numbers:
                    vars(owner).get(name + option, {}).pop(number, None)


def is_set_later(name: str) -> bool:
    return name in _SET_LATER or name.startswith("ds_")


def _hooks(owner: Any) -> Iterator[tuple[int, Any]]:
    for table in _tables(owner):
        yield from table.items()


def _tables(owner: Any) -> Iterator[dict[int, Any]]:
    if isinstance(owner, nn.Module):
        yield from (vars(owner)[name] for name in HOOKS)
    else:
        yield from (table for table in (owner._backward_hooks, owner._post_accumulate_grad_hooks) if table)


def _parts_of(module: nn.Module | None) -> list[Any]:
    """Which modules, and which names of parameters and of buffers they have."""
    if module is None:
        return []
    return [(name, id(each), *each._parameters, *each._buffers) for name, each in module.named_modules()]


def _alike(old: nn.Module, new: nn.Module) -> bool:
    """Are they made of the same modules?"""
    parts = [[(name, type(module)) for name, module in each.named_modules()] for each in (old, new)]
    return parts[0] == parts[1]


def _dictionary(owner: nn.Module, among: str) -> dict[str, Any]:
    return vars(owner) if among == _PLAIN else vars(owner)[among]


def _places(module: nn.Module) -> Iterator[_Place]:
    for among in (_MODULES, _PARAMETERS):
        yield from (_Place(module, among, name, value) for name, value in _dictionary(module, among).items())
    numbers = ((name, value) for name, value in vars(module).items() if type(value) is int)
    yield from (_Place(module, _PLAIN, name, value) for name, value in numbers)
