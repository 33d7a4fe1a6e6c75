"""A whole model, of which a rank's stages are left and sharded over the ranks that have the same ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from elastic.core.errors import UsageError
from elastic.core.mesh import Mesh
from elastic.engines.fsdp2 import deferred
from elastic.engines.fsdp2.belongings import is_released
from elastic.engines.fsdp2.config import BACK
from elastic.engines.fsdp2.experts import share
from elastic.engines.fsdp2.layers.tensor_parallel import Plan, apply
from elastic.engines.fsdp2.meshes import Meshes, make_meshes
from elastic.engines.fsdp2.pipeline.layers import Cut, Row, cut, parent_of, places_of_others, prune
from elastic.engines.fsdp2.pipeline.own_forward import require_callable
from elastic.engines.fsdp2.pipeline.tied import Groups, groups_of_tied, require_alike
from elastic.engines.fsdp2.sharding import FirstValues, move, require_shardable, shard_units, units
from elastic.engines.model.pipeline import Pipeline


def shard_stage(
    model: torch.nn.Module,
    pipeline: Pipeline,
    row: Row,
    options: Mapping[str, Any],
    device: torch.device,
    begins: bool,
    mesh: Mesh,
    plan: Plan | None = None,
    cell: dist.ProcessGroup | None = None,
    experts: Mapping[str, torch.nn.Module] | None = None,
) -> tuple[Meshes, Cut, Groups]:
    """In place: what is left of the model are the layers of this rank's stages in `mesh`, cut as `plan` says over the
    ranks of `cell`, with DTensors over the ranks that have the same, or groups of them. `experts`: the layers of the
    whole model whose experts the ranks of a stage share, as `mesh` has them, here or in other generations. Collective:
    all ranks begin with rank 0's buffers, and where the run `begins` with its parameters; so initial weights do not
    depend on where stages are cut. One on the meta device is given values by its `init_weights`. The groups are of
    ranks that share parameters across stages.

    Raises UsageError for a model that cannot be cut or sharded, by name.
    """
    if isinstance(model, FSDPModule):
        raise UsageError("the script has called fully_shard itself, and a pipeline is cut before that: leave it out")
    back, each = options["pipeline_schedule"] in BACK, options["pipeline_stages_per_rank"]
    if pipeline.own_forward:
        require_callable(model, row)
    found = cut(pipeline, row, model, mesh.pp, mesh.stage(dist.get_rank()), each, back)
    if not is_released(model):
        require_shardable(model)
    # Before it is on a device: the whole model need not fit there.
    first = FirstValues(model, device, begins)
    # Looked for in the whole model: a rank need not have all of them.
    _require_none_around(units(model, options["shard"]), model, row)
    others = deferred.Others(model, places_of_others(model, found))
    prune(model, found)
    if not options["cpu_offload"]:
        move(model, device)
    own = set(model.modules())
    layers = {name: layer for name, layer in (experts or {}).items() if layer in own}
    meshes = make_meshes(device, cell, mesh, options["shard_workers"], mesh if experts else None)
    if meshes.tp is not None:
        assert plan is not None
        assert meshes.pp is not None
        apply(plan, model, meshes.tp, stage=True)
        require_alike(model, found, meshes.pp, device)
    share(layers, meshes)
    options = {**options, "shard": _present(model, options["shard"])}
    shard_units(model, options, meshes.sharded, device, list(layers.values()), meshes.experts)
    first.give(meshes, torch.device("cpu") if options["cpu_offload"] else device, others)
    assert meshes.pp is not None
    return meshes, found, groups_of_tied(found, dist.get_process_group_ranks(meshes.pp))


def _require_none_around(found: Sequence[torch.nn.Module], model: torch.nn.Module, row: Row) -> None:
    """What is gathered and freed by calls of its own may have no layers inside, of which one stage calls some."""
    parents = {parent_of(model, name)[0] for name in chain.from_iterable(row)}
    for module in found:
        if module is not model and not parents.isdisjoint(module.modules()):
            raise UsageError(
                f"fsdp2: shard names {type(module).__name__}, which has layers of the pipeline inside, and stages have "
                "some of them: name the layers' classes"
            )


def _present(model: torch.nn.Module, classes: Sequence[str] | None) -> tuple[str, ...] | None:
    here = {type(module).__name__ for module in model.modules()}
    return None if classes is None else tuple(name for name in classes if name in here)
