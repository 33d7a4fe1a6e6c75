"""`EngineKind` of torch's FSDP2."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain, product
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from elastic.core.errors import UsageError
from elastic.core.generation_spec import GenerationSpec
from elastic.core.settings import RunSettings
from elastic.engines.base import Config, EngineKind, Nonfinite, ResolvedConfig, UserObjects
from elastic.engines.fsdp2 import marks
from elastic.engines.fsdp2.adapter import Fsdp2Adapter, Fsdp2Engine
from elastic.engines.fsdp2.belongings import Belongings, is_released, released_if_it_fails
from elastic.engines.fsdp2.config import read_options, refuse_copies, resolve
from elastic.engines.fsdp2.layers.tensor_parallel import is_known, read_plan, require_even
from elastic.engines.fsdp2.meshes import forget_meshes
from elastic.engines.fsdp2.pipeline.adapter import PipelineAdapter, PipelineEngine
from elastic.engines.fsdp2.pipeline.layers import Cut, put_back, read_layers
from elastic.engines.fsdp2.pipeline.sharding import shard_stage
from elastic.engines.fsdp2.sharding import repoint, shard_model
from elastic.engines.fsdp2.update.optimizers import one_of, scheduler_of
from elastic.engines.model.expert_layers import require_shareable
from elastic.engines.model.plain_names import named_parameters

# Not an option of the user's: the generation's ranks as a grid.
_MESH = "mesh"

# Of each model, the ids of the parameters that it had before it was first sharded, which the user may have given.
_first_names: WeakKeyDictionary[torch.nn.Module, dict[int, str]] = WeakKeyDictionary()

# torch imports these at the first use of a DTensor or an optimizer only.
_IMPORTED_LATE = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.experimental")


class Fsdp2:
    """Implements `elastic.engines.base.EngineKind`."""

    name = "fsdp2"
    cuts_again = True

    def preload(self) -> None:
        for name in _IMPORTED_LATE:
            importlib.import_module(name)

    def warm_up(self, settings: RunSettings | None) -> None:
        self.preload()

    def device(self, local_rank: int) -> tuple[str, torch.device]:
        if torch.cuda.is_available():
            return "nccl", torch.device("cuda", local_rank)
        return "gloo", torch.device("cpu")

    def before_join(self) -> None:
        forget_meshes()

    def after_join(self, backend: str) -> None:
        return None

    def destroy_groups(self) -> None:
        forget_meshes()
        dist.destroy_process_group()

    def answer_user_calls(
        self,
        initialize: Callable[..., Any] | None,
        run_id: str,
        spec: Callable[[], GenerationSpec],
        engines_own: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        return None

    def resolve(self, config: Config | None, spec: GenerationSpec, loader_batch: int | None = None) -> ResolvedConfig:
        chosen = config if config is not None else spec.engine_config or {}
        options = read_options(chosen)
        for tp, ep in product((spec.tp, *spec.tp_sizes), (spec.ep, *spec.ep_sizes)):
            refuse_copies(options, tp, ep, spec.sp)
        most_cells = max(spec.max_world_size, spec.world_size) // spec.mesh.per_cell
        found = resolve(options, spec.batch, spec.mesh.dp, loader_batch, most_cells)
        native = {**found.native, _MESH: spec.mesh}
        found = replace(found, native=native, begins=spec.checkpoint is None)
        return replace(found, tp_sizes=spec.tp_sizes, any_tp=spec.any_tp, ep_sizes=spec.ep_sizes)

    def build(
        self,
        resolved: ResolvedConfig,
        nonfinite: Nonfinite | None,
        device: torch.device,
        objects: UserObjects,
        layer_group: dist.ProcessGroup | None = None,
    ) -> tuple[Fsdp2Adapter, Any, Any]:
        model, plan, mesh = objects.model, None, resolved.native.get(_MESH)
        if is_released(model):
            put_back(model)
        tp = 1 if layer_group is None else layer_group.size()
        sizes = (tp, *resolved.required_tp)
        ep = (1 if mesh is None else mesh.ep, *resolved.ep_sizes)
        layers = require_shareable(model, ep, sizes) if max(ep) > 1 else {}
        if max((tp, *resolved.tp_sizes)) > 1 or objects.tp_plan is not None:
            plan = read_plan(objects.tp_plan, model, *sizes, experts=layers)
        given, pipeline = isinstance(model, FSDPModule), objects.pipeline
        before = _first_names.setdefault(model, {id(tensor): name for name, tensor in named_parameters(model)})
        marks.note(model)
        cut: Cut | None = None
        with released_if_it_fails(model):
            if pipeline is None:
                meshes = shard_model(model, resolved.native, device, resolved.begins, plan, layer_group, mesh, layers)
            else:
                row = read_layers(pipeline, model)
                assert mesh is not None
                meshes, cut, tied = shard_stage(
                    model, pipeline, row, resolved.native, device, resolved.begins, mesh, plan, layer_group, layers
                )
        require_even(model, resolved.required_tp)
        marks.carry(model)
        base = _optimizer(objects, resolved, before, dict(named_parameters(model)))
        _empty(objects.model_parameters, before)
        belongings: Belongings | str = Belongings(model, base)
        if given:
            belongings = "the script has called fully_shard itself, which binds its parameters to one world size"
        elif layer_group is not None and plan is not None and not is_known(plan):
            belongings = "tp_plan has styles besides torch's own: what they do to a model cannot be undone"
        scheduler = scheduler_of(objects.lr_scheduler, base)
        withhold = nonfinite == "skip"
        if cut is None:
            native = Fsdp2Engine(model, base, scheduler, resolved, device)
            return Fsdp2Adapter(native, meshes, device, resolved, withhold, belongings), base, scheduler
        native = PipelineEngine(model, base, scheduler, resolved, device)
        adapter = PipelineAdapter(native, meshes, device, resolved, withhold, belongings, cut, tied, pipeline)
        return adapter, base, scheduler


def _optimizer(
    objects: UserObjects, resolved: ResolvedConfig, before: dict[int, str], after: dict[str, torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """Over the sharded parameters. `objects.optimizer`: one, several, a function of the parameters that returns one or
    several, or None for the options'."""
    given = one_of(objects.optimizer)
    if isinstance(given, torch.optim.Optimizer):
        repoint(given, before, after)
        return given
    chosen = objects.model_parameters if objects.model_parameters is not None else after.values()
    parameters = [found for entry in chosen if (found := _sharded(entry, before, after)) is not None]
    if callable(given):
        made = one_of(given(parameters))
        if not isinstance(made, torch.optim.Optimizer):
            raise UsageError(f"optimizer= returned a {type(made).__name__}, not a torch optimizer")
        return made
    if given is not None:
        raise UsageError(
            f"optimizer must be a torch optimizer or a function that makes one, not {type(given).__name__}"
        )
    said = resolved.native["optimizer"]
    if said is None:
        raise UsageError("no optimizer: pass optimizer= to elastic.initialize, or give fsdp2's `optimizer`")
    kind = getattr(torch.optim, said["type"], None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise UsageError(f"fsdp2: optimizer.type must be a class of torch.optim, got {said['type']!r}")
    made = kind(parameters, **said.get("params", {}))
    assert isinstance(made, torch.optim.Optimizer)
    return made


def _empty(given: Sequence[Any] | None, before: dict[int, str]) -> None:
    """Parameters of before the sharding would keep a whole model in memory for as long as the list is held."""
    entries = [entry["params"] if isinstance(entry, dict) else [entry] for entry in given or ()]
    for parameter in chain.from_iterable(entries):
        if id(parameter) in before and not isinstance(parameter, DTensor):
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)


def _sharded(entry: Any, before: dict[int, str], after: dict[str, torch.nn.Parameter]) -> Any:
    """A parameter, or a parameter group, of before the sharding -> the same of after it; None for a parameter that
    another stage has."""
    if isinstance(entry, dict):
        found = (_sharded(parameter, before, after) for parameter in entry["params"])
        return {**entry, "params": [parameter for parameter in found if parameter is not None]}
    if isinstance(entry, torch.nn.Parameter) and id(entry) in before:
        return after.get(before[id(entry)])
    if any(entry is parameter for parameter in after.values()):
        return entry
    raise UsageError("model_parameters has a parameter that the model does not have")


KIND: EngineKind = Fsdp2()
