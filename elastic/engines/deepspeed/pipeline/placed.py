"""A PipelineModule of the user's in the mesh of a generation, and in that of a later one: the same object, which has
the layers of another stage then.

`PipelineModule.__init__` (0.19.8, runtime/pipe/module.py) is given the mesh: the number of stages, and a topology in
which the stages of one pipeline are neighbouring ranks. For a later generation it is called again on the same object:
layers that this rank has had are the same modules, and others are built as they were at first. Values are restored.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from elastic.core.errors import UsageError
from elastic.core.mesh import Mesh
from elastic.engines.base import UserObjects
from elastic.engines.deepspeed.pipeline.module import LayerSeeds, is_tied
from elastic.engines.model.placeholders import fill_placeholders, placeholder

_GROUPS = (
    "it has given groups of parameters, and nobody but the function can tell which of them the parameters of another "
    "stage's layers are in: give one group of all"
)
_CHANGED = (
    "it has changed layers after its PipelineModule had built them (hooks, attributes, modes, what is trained), and "
    "nobody else would do so with those of another stage: let the layers do it as they are built"
)
# Of the object itself, which torch makes anew: what is on it is the script's.
_OWN = ("training", "_parameters", "_buffers", "_non_persistent_buffers_set")


@dataclass
class _Made:
    """How a PipelineModule was made, and what the rank has had of it and has not now.

    `layers` and `tied`: by number, and by key; all of them where it is `released`, and then also what is on the object
    itself (`own`). `form`: what its layers were like when they were made, until an engine is built. `counts`: the
    parameters of each layer, once they are known. `follows`: the optimizer, or the parameters, that were given are all
    that are trained, or all. `obstacle`: why it cannot be placed again.
    """

    original: Callable[..., None]
    arguments: dict[str, Any]
    counts: Sequence[int] | None = None
    layers: dict[int, nn.Module] = field(default_factory=dict)
    tied: dict[str, nn.Module] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    form: Any = None
    follows: str = ""
    obstacle: str | None = None
    released: bool = False


_made: WeakKeyDictionary[nn.Module, _Made] = WeakKeyDictionary()


def placed(original: Callable[..., None], self: Any, args: Any, kwargs: Any, mesh: Mesh) -> None:
    """`PipelineModule.__init__` in the mesh of this generation. Raises UsageError where the user has said otherwise.

    Collective."""
    bound = inspect.signature(original).bind(self, *args, **kwargs)
    given = dict(bound.arguments)
    del given["self"]
    if given.get("topology") is not None:
        raise UsageError(
            "PipelineModule was given a topology, which follows from the job's mesh: {pp: N}; leave it out"
        )
    stages = given.get("num_stages")
    if stages not in (None, mesh.pp):
        raise UsageError(
            f"PipelineModule was given num_stages={stages}, and the job's mesh says pp: {mesh.pp}; leave num_stages "
            'out, or give elastic.get_context().mesh["pp"]'
        )
    made = _Made(original, {**given, "layers": list(given["layers"])})
    _place(self, made, made.arguments["layers"], mesh)
    made.form = _form(self)
    _made[self] = made


def is_released(model: nn.Module) -> bool:
    made = _made.get(model)
    return made is not None and made.released


def release(model: Any) -> None:
    """The generation is over, and the model as it was before there was an engine: it has no groups any more."""
    made = _made[model]
    if made.released:
        return
    for number in range(model._local_start, model._local_stop):
        if isinstance(found := model._modules.get(str(number)), nn.Module):
            made.layers[number] = found
    made.tied.update(model.tied_modules)
    made.own = {name: value for name, value in vars(model).items() if name in _OWN or "_hooks" in name}
    made.own["_modules"] = {name: found for name, found in model._modules.items() if not _is_placed(name)}
    model.tied_comms, model.world_group, model._grid = {}, None, None
    made.released = True


def place_again(model: Any, mesh: Mesh) -> None:
    """In another generation. Collective: what the constructor does on ranks whose function is called."""
    made = _made[model]
    specs = made.arguments["layers"]
    _place(model, made, [_kept(made, number, spec) for number, spec in enumerate(specs)], mesh)
    model._layer_specs = list(specs)
    vars(model).update({name: value for name, value in made.own.items() if name != "_modules"})
    model._modules.update(made.own["_modules"])
    # What the model has the engine hooks itself on: nothing here may hold it, as the model is its key.
    here = set(model.modules())
    made.layers = {number: layer for number, layer in made.layers.items() if layer not in here}
    made.tied = {key: layer for key, layer in made.tied.items() if layer not in here}
    made.own, made.released = {}, False
    for layer in (*made.layers.values(), *made.tied.values()):
        for parameter in layer.parameters():
            # What is elsewhere takes no memory.
            parameter.data = placeholder(parameter, parameter.shape)


def of_stage(model: nn.Module, objects: UserObjects) -> UserObjects:
    """With the optimizer, or the parameters, that were given for another stage over those of this one."""
    made, given = _made[model], objects.model_parameters
    first, made.form = made.form, None
    by_optimizer = isinstance(objects.optimizer, torch.optim.Optimizer)
    groups = objects.optimizer.param_groups if by_optimizer else given
    if first is not None:
        made.follows = "" if groups is None else _followed(model, groups)
        if _form(model) != first:
            made.obstacle = _CHANGED
        elif groups is not None and not made.follows:
            made.obstacle = _GROUPS
        return objects
    if not made.follows:
        return objects
    assert groups is not None
    own = [p for p in model.parameters() if made.follows == "all" or p.requires_grad]
    if by_optimizer:
        objects.optimizer.param_groups[0]["params"] = own
        return objects
    return replace(objects, model_parameters=[{**groups[0], "params": own}] if isinstance(groups[0], Mapping) else own)


def obstacle(model: nn.Module) -> str | None:
    """Why the model cannot be placed again; None where it can."""
    return _made[model].obstacle


# -- inside ------------------------------------------------------------------------------------------------------------


def _place(self: Any, made: _Made, layers: list[Any], mesh: Mesh) -> None:
    from deepspeed.runtime.pipe.topology import ProcessTopology

    given = made.arguments
    more = {
        "layers": layers,
        "num_stages": None,
        "topology": ProcessTopology(["data", "pipe"], [mesh.dp, mesh.pp]),
        "seed_fn": LayerSeeds(self, bool(given.get("seed_layers")), given.get("seed_fn")),
        "seed_layers": True,
    }
    count = type(self)._count_layer_params

    def counted() -> Sequence[int]:
        """DeepSpeed builds every layer of the model for it."""
        if made.counts is None:
            made.counts = count(self)
        return made.counts

    vars(self)["_count_layer_params"] = counted
    before = torch.get_rng_state()
    try:
        made.original(self, **{**given, **more})
    finally:
        # What the script draws next does not depend on which layers were built here.
        torch.set_rng_state(before)
        vars(self).pop("_count_layer_params", None)


def _kept(made: _Made, number: int, spec: Any) -> Any:
    """In the place of what builds a layer: what gives the one that was built before."""
    layer = made.tied.get(spec.key) if is_tied(spec) else made.layers.get(number)
    if layer is None or isinstance(spec, nn.Module):
        return spec
    found = copy.copy(spec)
    found.build = _giving(layer)
    return found


def _giving(layer: nn.Module) -> Callable[..., nn.Module]:
    def build(*_: Any, **__: Any) -> nn.Module:
        # DeepSpeed moves it to its device.
        fill_placeholders(layer)
        return layer

    return build


def _is_placed(name: str) -> bool:
    return name.isdecimal() or name in ("tied_modules", "loss_fn")


def _followed(model: nn.Module, groups: Sequence[Any]) -> str:
    if isinstance(groups[0], Mapping):
        if len(groups) > 1:
            return ""
        groups = groups[0]["params"]
    given = {id(parameter) for parameter in groups}
    if given == {id(p) for p in model.parameters() if p.requires_grad}:
        return "trained"
    return "all" if given == {id(p) for p in model.parameters()} else ""


def _form(model: nn.Module) -> Any:
    """What is on the modules and their parameters besides values."""
    modules = [(name, type(m), m.training, _marks(m)) for name, m in model.named_modules() if name]
    return modules, [(name, p.dtype, p.requires_grad, _marks(p)) for name, p in model.named_parameters()]


def _marks(owner: Any) -> Any:
    return {name: len(held) if "_hooks" in name and held is not None else None for name, held in vars(owner).items()}
