"""Layers that neighbouring ranks share (`mesh: {tp: N}`), as torch's `parallelize_module` cuts them.

The plan is the user's, in torch's own terms, or the one that a Hugging Face model has (release 5 of transformers,
distributed/tensor_parallel.py; release 4 has the other names). torch has no way back from a plan: what it leaves on the
modules is noted here, so that a model can be given back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from itertools import product
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.utils._pytree import tree_leaves

from elastic.core.errors import MeshRefused, UsageError
from elastic.core.mesh import described
from elastic.core.sharding.cuts import Cut
from elastic.engines.fsdp2.layers import adapters, conv1d
from elastic.engines.fsdp2.meshes import cut_of
from elastic.engines.model.cuts import Cuts, Whole
from elastic.engines.model.plain_names import named_buffers, named_modules, named_parameters, plain
from elastic.engines.model.shared_layers import heads_of, is_conv1d, is_fused, refuse_split_heads

# Module names and what is done with them, in the order in which it is.
Plan = tuple[tuple[str, ParallelStyle], ...]

_WHOLE_INPUT: Callable[[], ParallelStyle] = lambda: RowwiseParallel(input_layouts=Replicate())  # noqa: E731
_WHOLE_OUTPUT: Callable[[], ParallelStyle] = lambda: ColwiseParallel(output_layouts=Replicate())  # noqa: E731
_NAMED: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "colwise_rep": _WHOLE_OUTPUT,
    "colwise_gather_output": _WHOLE_OUTPUT,
    "rowwise": RowwiseParallel,
    "rowwise_rep": _WHOLE_INPUT,
    "rowwise_split_input": _WHOLE_INPUT,
    "embedding_rowwise": _WHOLE_INPUT,
    # Of each token and head by itself: along which of the other dimensions ranks have their part makes no difference.
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=1, use_local_output=True),
}

# What plans have left on modules: the module, the dictionary of hooks, the hooks' keys.
_left: WeakKeyDictionary[nn.Module, list[tuple[ref[nn.Module], str, frozenset[int]]]] = WeakKeyDictionary()
_MARK = "_distribute_module_applied"
# Of models, which parameters are not cut as their placements say, and why.
_unlike: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()


def read_plan(given: Any, model: nn.Module, *sizes: int, experts: Collection[str] = ()) -> Plan:
    """`given`: the user's, a mapping of module patterns to styles of torch or to their names in transformers, or one
    style for the model; None for the model's own, without what it says of layers of `experts`, which ranks share.
    `sizes`: by how many ranks each layer is shared, here and in other generations.

    Raises UsageError where there is none, and for a pattern or a style that cannot be honoured, by name.
    """
    own, tp = given is None, max(sizes)
    modules = dict(named_modules(model))
    if own:
        given = _own_plan(model, modules)
    if isinstance(given, ParallelStyle):
        given = {"": given}
    if not given or not isinstance(given, Mapping):
        raise UsageError(
            f"{described(1, tp)}: nothing says how the layers of {type(model).__name__} are cut; pass tp_plan= to "
            'elastic.initialize, as torch\'s parallelize_module takes it: {"layers.*.up": ColwiseParallel(), ...}'
        )
    parameters = [name for name, _ in named_parameters(model) if name.rpartition(".")[0] not in experts]
    named: dict[str, tuple[str, ParallelStyle]] = {}
    for pattern, style in given.items():
        for name in _matched(pattern, modules, parameters, experts, own):
            if name in named:
                raise UsageError(
                    f"tp_plan: {named[name][0]!r} and {pattern!r} both say how {name!r} is cut; leave one out"
                )
            named[name] = (pattern, _style(style, name, modules))
    if not named:
        raise UsageError(f"tp_plan: none of {[*given]} is a module of {type(model).__name__}; pass tp_plan= that fits")
    for (name, (_, style)), size in product(named.items(), sizes):
        if size > 1 and _is_cut(style):
            refuse_split_heads(model, name, size)
    parts = (part for name, (_, style) in named.items() for part in adapters.parts(name, style, modules))
    return tuple((name, conv1d.for_module(style, modules[name])) for name, style in parts)


def _matched(
    pattern: str, modules: Mapping[str, nn.Module], parameters: Iterable[str], experts: Collection[str], own: bool
) -> list[str]:
    """The modules of that pattern, but for experts that ranks share."""
    found = [name for name in modules if matches(name, pattern)]
    shared = [name for name in found if any(f"{name}.".startswith(f"{layer}.") for layer in experts)]
    if shared and not own:
        raise UsageError(
            f"tp_plan: {pattern!r} says how {shared[0]!r} is cut, whose experts ranks share (mesh.ep): leave it out"
        )
    absent = not own or (not shared and any(matches(name, pattern) for name in parameters))
    if absent and len(found) == len(shared):
        raise UsageError(f"tp_plan: the model has no module {pattern!r}; it has {_first(modules)}")
    return [name for name in found if name not in shared]


def is_known(plan: Plan) -> bool:
    """Are all styles torch's own, or like them? What others leave on a module cannot be taken off it."""
    own = (ParallelStyle.__module__, conv1d.__name__)
    return all(type(style).__module__ in own for _, style in plan)


def apply(plan: Plan, model: nn.Module, mesh: DeviceMesh, stage: bool = False) -> None:
    """Cut the model in place, with the values that this rank has: all ranks of a cell have the same. Not collective.

    `stage`: it is one of a pipeline, and what the plan says of other stages' layers is left out. Raises UsageError
    naming a parameter that cannot be cut so.
    """
    modules = dict(named_modules(model))
    tied, trained = _tied(model), {name: p.requires_grad for name, p in named_parameters(model)}
    before = {module: _hooks(module) for module in modules.values()}
    for name, style in ((name, style) for name, style in plan if name in modules or not stage):
        style.src_data_rank = None
        try:
            with _comparing(model, name, modules[name], mesh.get_local_rank()):
                style._apply(modules[name], mesh)
        except (NotImplementedError, ValueError, AssertionError) as error:
            raise UsageError(
                f"tp_plan: {type(style).__name__} cannot be applied to {name!r}, a {type(modules[name]).__name__}: "
                f"{error}"
            ) from error
    _left[model] = [
        (ref(module), kind, frozenset(keys - before[module].get(kind, set())))
        for module in before
        for kind, keys in _hooks(module).items()
    ]
    _tie_again(tied)
    for name, parameter in named_parameters(model):
        # torch's SequenceParallel makes frozen ones trained.
        parameter.requires_grad_(trained[name])
    _check(model, mesh.size(), must_cut=not stage)


def cuts_of(model: nn.Module, parameters: Mapping[str, torch.Tensor]) -> Cuts:
    """How a plan has cut the model's parameters, by name, as they are now."""
    found: dict[str, Cut | str] = {name: cut for name, each in parameters.items() if (cut := cut_of(each)) is not None}
    return found | {name: why for name, why in _unlike.get(model, {}).items() if name in parameters}


@contextmanager
def _comparing(model: nn.Module, name: str, module: nn.Module, lane: int) -> Iterator[None]:
    """Around what cuts one module of the model: module by module, as all of it need not fit beside its slices."""
    before = {id(parameter) for _, parameter in named_parameters(module) if isinstance(parameter, DTensor)}
    whole = Whole(module)
    yield
    for own, parameter in named_parameters(module):
        if id(parameter) not in before:
            local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter.data
            said = whole.compared(own, local, cut_of(parameter), lane)
            if said is not None:
                _unlike.setdefault(model, {})[f"{name}.{own}" if name else own] = said


def undo(model: nn.Module) -> None:
    """Take off the modules what a plan has left there. Its parameters are the caller's."""
    for held, kind, keys in _left.pop(model, []):
        module = held()
        for key in keys if module is not None else ():
            vars(module)[kind].pop(key, None)
    for module in model.modules():
        vars(module).pop(_MARK, None)


def matches(name: str, pattern: str) -> bool:
    """Is `pattern`, in which each part between dots may have wildcards, that name?"""
    names, patterns = name.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def _own_plan(model: nn.Module, modules: Mapping[str, nn.Module]) -> Mapping[str, Any] | None:
    """By the names of all of the model, which may be one of transformers with adapters around it."""
    base = adapters.base_of(model)
    given = getattr(base, "_tp_plan", None) or getattr(getattr(base, "config", None), "base_model_tp_plan", None)
    if not given and any(is_conv1d(module) for module in base.modules()):
        given = conv1d.PLAN
    above = next((f"{name}." for name, module in modules.items() if module is base and name), "")
    return {f"{above}{pattern}": style for pattern, style in given.items()} if given else None


def _style(style: Any, name: str, modules: Mapping[str, nn.Module]) -> ParallelStyle:
    if isinstance(style, str):
        if style not in _NAMED:
            raise UsageError(
                f"tp_plan: the style {style!r} of {name!r} is not supported; supported are {', '.join(_NAMED)}, and "
                "torch's own styles in tp_plan= of elastic.initialize"
            )
        style = _NAMED[style]()
    if not isinstance(style, ParallelStyle):
        raise UsageError(
            f"tp_plan: {name!r} has a {type(style).__name__}, which is neither a style of "
            "torch.distributed.tensor.parallel nor a name"
        )
    if _is_cut(style) and is_fused(name) and heads_of(name, modules) is None:
        raise UsageError(
            f"tp_plan: {name!r} holds several projections, and a rank would have the rows of one and not of another: "
            "make each a module of its own, or gather its output (output_layouts=Replicate())"
        )
    return style


def _is_cut(style: ParallelStyle) -> bool:
    """Does what follows get this rank's part of the output?"""
    return isinstance(style, ColwiseParallel) and style.output_layouts != (Replicate(),)


def _first(names: Mapping[str, Any]) -> str:
    found = [name for name in names if name]
    return ", ".join(found[:6]) + (", ..." if len(found) > 6 else "")


def _hooks(module: nn.Module) -> dict[str, set[int]]:
    """Every kind of hooks that a module has: the keys of those that are there."""
    return {kind: set(held) for kind, held in vars(module).items() if "_hooks" in kind and isinstance(held, dict)}


def _tied(model: nn.Module) -> list[list[tuple[str, nn.Module, str]]]:
    """Of each parameter that several modules have: where it is."""
    places: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                whole = plain(f"{prefix}.{name}" if prefix else name)
                places.setdefault(id(parameter), []).append((whole, module, name))
    return [found for found in places.values() if len(found) > 1]


def _tie_again(tied: list[list[tuple[str, nn.Module, str]]]) -> None:
    """A plan gives every module a parameter of its own: tied ones would be trained apart without a word."""
    for places in tied:
        # What stands in for another stage's module is cut by no plan here.
        found = [module._parameters[name] for _, module, name in places if not getattr(module, "elastic_absent", False)]
        cuts = {_cut(parameter) for parameter in found}
        if len(cuts) > 1:
            names = " and ".join(repr(whole) for whole, _, _ in places)
            raise UsageError(
                f"tp_plan: {names} are one parameter, and the plan cuts it in one place as in no other; cut both alike "
                "(an embedding with RowwiseParallel(input_layouts=Replicate()), its head with ColwiseParallel), or none"
            )
        for _, module, name in places:
            module._parameters[name] = found[0]


def _cut(parameter: Any) -> str:
    return repr(parameter.placements) if isinstance(parameter, DTensor) else "whole"


def _check(model: nn.Module, tp: int, must_cut: bool) -> None:
    for name, buffer in named_buffers(model):
        if isinstance(buffer, DTensor):
            raise UsageError(
                f"tp_plan: buffer {name!r} would be a DTensor; leave the module that has it out of the plan"
            )
    cut = False
    for name, parameter, placement in _placed(model):
        if type(placement) not in (Shard, Replicate):
            raise UsageError(f"tp_plan: parameter {name!r} is placed {placement}; it can be cut evenly, or left whole")
        if isinstance(placement, Shard):
            cut = True
            _require_even(name, tuple(parameter.shape), placement.dim, tp)
    if must_cut and not cut:
        raise UsageError(
            f"tp_plan cuts no parameter, so that all ranks of a cell would compute the same: let it cut layers, or "
            f"leave {described(1, tp)} out"
        )


def require_even(model: nn.Module, sizes: Iterable[int]) -> None:
    """Of a model that is cut: raises UsageError for a parameter that ranks of another generation, one of `sizes`, could
    not share evenly."""
    for (name, parameter), size in product(named_parameters(model), sizes):
        if (cut := cut_of(parameter)) is not None:
            _require_even(name, cut.shape, cut.dim, size)


def _require_even(name: str, shape: tuple[int, ...], dim: int, tp: int) -> None:
    if shape[dim] % tp:
        raise MeshRefused(
            f"tp_plan: parameter {name!r} of shape {shape} cannot be cut along dimension {dim} by {described(1, tp)}; "
            f"make that size a multiple of {tp}, or leave the module out"
        )


def _placed(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, Any]]:
    for name, parameter in named_parameters(model):
        if isinstance(parameter, DTensor):
            yield name, parameter, parameter.placements[-1]


def require_local(value: Any, what: str) -> None:
    """Raises UsageError for DTensors in a nested `value`: losses are computed from what each rank has whole."""
    if any(isinstance(leaf, DTensor) for leaf in tree_leaves(value)):
        raise UsageError(
            f"{what} is a DTensor; let tp_plan give plain tensors of the whole output "
            "(ColwiseParallel(output_layouts=Replicate()) for the last layer)"
        )
