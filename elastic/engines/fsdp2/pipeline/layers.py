"""A whole model's layers in their order, and what is left of the model on a rank that has some of them.

Names stay those of the whole model: in the place of each layer of another stage there is an empty module, which has
only what the layer shares with layers of this stage (tied parameters), under its first name. That module knows the
layer, which has no values meanwhile: in another generation it may be this rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch
from torch import nn

from elastic.core.errors import UsageError
from elastic.core.sharding.stages import balanced, holders, stages_that_fit
from elastic.engines.fsdp2.layers.tensor_parallel import matches
from elastic.engines.fsdp2.pipeline.passes import Arguments, Pass
from elastic.engines.model.pipeline import Pipeline
from elastic.engines.model.plain_names import named_buffers, named_modules, named_parameters


class Absent(nn.Module):
    """In the place of a `layer`, or of a part of one (None), that another stage has."""

    elastic_absent = True

    def __init__(self, layer: nn.Module | None = None) -> None:
        super().__init__()
        # In a tuple it is no part of this module.
        self.elastic_layer: tuple[nn.Module, ...] = () if layer is None else (layer,)
        # Parameters that it shares with this stage: the module that has one and the name there, and here.
        self.elastic_shared: list[tuple[nn.Module, str, nn.Module, str]] = []

    def train(self, mode: bool = True) -> Absent:
        """The script's calls of the model's `train` and `eval` are for all layers."""
        for layer in self.elastic_layer:
            layer.train(mode)
        return super().train(mode)


# Of the whole model, in their order: the layers, by name, that stay together.
Row = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Cut:
    """What one rank of a pipeline has of the row of layers. `begins`: the first layer of each stage; `holders`: the
    rank that has it. `tied`: names of parameters that several ranks have, with these, the same on all of them.
    `outside`: names of the buffers that are of no layer, which all have."""

    row: Row
    begins: tuple[int, ...]
    holders: tuple[int, ...]
    rank: int
    tied: dict[str, tuple[int, ...]]
    outside: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(chain.from_iterable(self.row))

    @property
    def stages(self) -> tuple[int, ...]:
        """The rank's."""
        return tuple(stage for stage, holder in enumerate(self.holders) if holder == self.rank)

    def layers_of(self, stage: int) -> range:
        ends = (*self.begins[1:], len(self.names))
        return range(self.begins[stage], ends[stage])

    @property
    def own(self) -> tuple[int, ...]:
        """The rank's layers."""
        return tuple(layer for stage in self.stages for layer in self.layers_of(stage))


def read_layers(pipeline: Any, model: nn.Module) -> Row:
    """The names of the layers in their order. Raises UsageError for a model that is not a row of them, by name."""
    if not isinstance(pipeline, Pipeline):
        raise UsageError(f"pipeline= of elastic.initialize takes an elastic.Pipeline, not a {type(pipeline).__name__}")
    if any(isinstance(module, Absent) for module in model.modules()):
        raise UsageError("the model was cut into stages before; build it in the training function, whole")
    said = _planned(model) if pipeline.layers is None and pipeline.own_forward else pipeline.layers
    if said is None and (pipeline.own_forward or not isinstance(model, nn.Sequential)):
        raise UsageError(
            f"nothing says which layers {type(model).__name__} has, in which order; name them, as "
            'elastic.Pipeline(loss_fn, layers=["embed", "layers.*", "norm", "head"]), or give a torch.nn.Sequential'
        )
    known = [name for name, _ in named_modules(model) if name]
    row: list[tuple[str, ...]] = []
    for entry in [name for name in known if "." not in name] if said is None else said:
        if isinstance(entry, str):
            row += [(name,) for name in _matching(entry, known)]
        else:
            row.append(tuple(name for pattern in entry for name in _matching(pattern, known)))
    if not pipeline.own_forward:
        _require_one_each(pipeline, row)
    _require_row(tuple(chain.from_iterable(row)), model, pipeline.own_forward)
    return tuple(row)


def cut(
    pipeline: Pipeline,
    row: Row,
    model: nn.Module,
    ranks: int,
    rank: int,
    stages_per_rank: int = 1,
    back: bool = False,
) -> Cut:
    """Of a whole model, into `stages_per_rank` stages for each of `ranks`, or as many as it has layers for. `back`: see
    `holders`. Raises UsageError for stages that cannot be."""
    own = [list(nn.ModuleList(layer_of(model, name) for name in names).parameters()) for names in row]
    trained = [any(p.requires_grad for p in parameters) for parameters in own]
    held_by = holders(ranks, stages_that_fit(stages_per_rank, ranks, sum(trained)), back)
    stages = len(held_by)
    said = pipeline.begins.get(stages)
    if said is not None:
        begins = _said(said, [names[0] for names in row], stages)
    else:
        begins = balanced([sum(p.numel() for p in parameters) for parameters in own], trained, stages)
    for number, (begin, end) in enumerate(zip(begins, (*begins[1:], len(row)), strict=True)):
        if not any(trained[begin:end]):
            without = ", ".join(chain.from_iterable(row[begin:end]))
            raise UsageError(
                f"stage {number} of {stages} has no trained parameters ({without}); let another layer begin it in "
                "elastic.Pipeline(begins=...)"
            )
    held: dict[int, set[int]] = {}
    for number, parameters in enumerate(own):
        for parameter in parameters:
            held.setdefault(id(parameter), set()).add(held_by[sum(begin <= number for begin in begins) - 1])
    tied = {
        name: tuple(sorted(held[id(parameter)]))
        for name, parameter in named_parameters(model)
        if len(held[id(parameter)]) > 1
    }
    first = [0, *accumulate(map(len, row))]
    names = tuple(chain.from_iterable(row))
    outside = tuple(name for name, _ in named_buffers(model) if _layer_with(name, names) is None)
    return Cut(row, tuple(first[begin] for begin in begins), held_by, rank, tied, outside)


def prune(model: nn.Module, cut: Cut) -> None:
    """Leave of the model what the rank's stages have, in place. Other layers are on the meta device then."""
    own = {id(p) for number in cut.own for p in layer_of(model, cut.names[number]).parameters()}
    without: dict[int, nn.Parameter] = {}
    for parent, leaf in places_of_others(model, cut):
        layer = parent._modules[leaf]
        assert layer is not None
        parent._modules[leaf] = _stand_in(layer, own)
        for module in layer.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and not parameter.is_meta:
                    empty = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
                    module._parameters[name] = without.setdefault(id(parameter), empty)


def put_back(model: nn.Module) -> None:
    """Of a model that was cut and has no values: make it whole again."""
    for parent in list(model.modules()):
        stand_ins = {leaf: found for leaf, found in parent._modules.items() if isinstance(found, Absent)}
        for leaf, found in stand_ins.items():
            for module, name, holder, own in found.elastic_shared:
                module._parameters[name] = holder._parameters[own]
            for layer in found.elastic_layer:
                parent._modules[leaf] = layer


def places_of_others(model: nn.Module, cut: Cut) -> list[tuple[nn.Module, str]]:
    """Where the layers of other ranks' stages are, in the whole model: the module, and the name in it."""
    layers = frozenset(cut.own)
    return [parent_of(model, name) for number, name in enumerate(cut.names) if number not in layers]


def layers_by_name(model: nn.Module, row: Row) -> dict[str, tuple[int, ...]]:
    """In which elements of the row, by number, each parameter is that this rank has, those of other ranks included."""
    found: dict[int, set[int]] = {}
    for name, parameter in named_parameters(model, remove_duplicate=False):
        own = {number for number, names in enumerate(row) if _layer_with(name, names) is not None}
        found.setdefault(id(parameter), set()).update(own)
    return {name: tuple(sorted(found[id(parameter)])) for name, parameter in named_parameters(model)}


class Chain:
    """In the place of a model's `forward`: the layers of one of the rank's stages, one after another. `stage`: its
    number. `before` is called with the number of each layer, counted in the whole model, before it."""

    def __init__(self, model: nn.Module, cut: Cut) -> None:
        self._layers = {
            stage: [(number, layer_of(model, cut.names[number])) for number in cut.layers_of(stage)]
            for stage in cut.stages
        }
        self.stage = cut.stages[0]
        self.before: Callable[[int], None] | None = None

    @property
    def modules(self) -> list[nn.Module]:
        """The layers of the stage."""
        return [layer for _, layer in self._layers[self.stage]]

    def given(self, now: Pass, received: tuple[torch.Tensor, ...]) -> Arguments:
        """What the model is called with next, for a micro-batch of which the stage before has sent this."""
        return received or now.take_inputs(), {}

    def __call__(self, *inputs: Any) -> Any:
        output: Any = None
        for number, layer in self._layers[self.stage]:
            if self.before is not None:
                self.before(number)
            output = layer(*inputs)
            inputs = tuple(output) if isinstance(output, (tuple, list)) else (output,)
        return output


def layer_of(model: nn.Module, name: str) -> nn.Module:
    """The module that is called, which torch.compile may have wrapped."""
    parent, leaf = parent_of(model, name)
    found = parent._modules[leaf]
    assert found is not None
    return found


def parent_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    above, _, leaf = name.rpartition(".")
    return dict(named_modules(model))[above], leaf


def _planned(model: nn.Module) -> list[str] | None:
    """The layers of a model of transformers, or of the first inside of another, by its plan: in the plan's order, but
    that the head's comes first in it."""
    for inside, module in named_modules(model):
        # Its own: adapters' models have all attributes of theirs.
        plan, base = vars(module).get("_pp_plan"), f"{getattr(module, 'base_model_prefix', '')}."
        if plan:
            names = sorted(plan, key=lambda name: not name.startswith(base))
            lists = {name for name in names if isinstance(module.get_submodule(name), nn.ModuleList)}
            whole = [f"{inside}.{name}" if inside else name for name in names]
            return [f"{full}.*" if name in lists else full for name, full in zip(names, whole, strict=True)]
    return None


def _matching(pattern: str, known: Sequence[str]) -> Iterator[str]:
    found = [name for name in known if matches(name, pattern)]
    if not found:
        few = ", ".join(known[:6]) + (", ..." if len(known) > 6 else "")
        raise UsageError(f"elastic.Pipeline: the model has no module {pattern!r}; it has {few}")
    yield from found


def _require_one_each(pipeline: Pipeline, row: Sequence[tuple[str, ...]]) -> None:
    several = next((names for names in row if len(names) > 1), None)
    if several is not None:
        raise UsageError(
            f"elastic.Pipeline: layers has {several} as one element, which only the model's own forward can call "
            "(own_forward=True); give them one by one"
        )
    if pipeline.loss_fn is None:
        raise UsageError(
            "elastic.Pipeline: no loss_fn, and without own_forward=True nothing else computes a loss from what the "
            "last layer gives"
        )


def _require_row(names: Sequence[str], model: nn.Module, own_forward: bool) -> None:
    for number, name in enumerate(names):
        if name in names[:number]:
            raise UsageError(f"elastic.Pipeline: layers names {name!r} twice; a layer is called once")
        inside = _layer_with(name, names)
        if inside is not None:
            raise UsageError(f"elastic.Pipeline: layers names {inside!r} and {name!r}, which is a part of it")
    inside_of: dict[int, str] = {}
    for name, tensor in named_buffers(model, remove_duplicate=False):
        layer = _layer_with(name, names) or ""
        if inside_of.setdefault(id(tensor), layer) != layer:
            raise UsageError(f"buffer {name!r} is shared by several layers: give each layer a buffer of its own")
    buffers = () if own_forward else named_buffers(model)
    for name, _ in (*named_parameters(model, remove_duplicate=False), *buffers):
        if _layer_with(name, names) is None:
            raise UsageError(
                f"{name!r} is of no layer of the pipeline, so that it would not be trained: put it into a module that "
                "elastic.Pipeline(layers=...) names"
            )


def _layer_with(name: str, layers: Sequence[str]) -> str | None:
    return next((layer for layer in layers if name.startswith(f"{layer}.")), None)


def _said(said: Sequence[str], names: Sequence[str], stages: int) -> tuple[int, ...]:
    unknown = [name for name in said if name not in names]
    begins = tuple(names.index(name) for name in said if name in names)
    if unknown or len(begins) != stages or begins[0] != 0 or list(begins) != sorted(set(begins)):
        raise UsageError(
            f"elastic.Pipeline: begins for {stages} stages must name {stages} layers in their order, the first of them "
            f"{names[0]!r}, and says {list(said)}"
        )
    return begins


def _stand_in(layer: nn.Module, own: set[int]) -> Absent:
    found, places = Absent(layer), dict(named_modules(layer))
    for name, parameter in named_parameters(layer, remove_duplicate=False):
        if id(parameter) in own:
            *path, leaf = name.split(".")
            holder: nn.Module = found
            for part in path:
                if part not in holder._modules:
                    holder.add_module(part, Absent())
                holder = holder.get_submodule(part)
            holder.register_parameter(leaf, parameter)
            found.elastic_shared.append((places[".".join(path)], leaf, holder, leaf))
    return found
