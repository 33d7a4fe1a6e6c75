"""`EngineKind` of DeepSpeed: what a process needs before its first engine, and around the groups of each generation."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from elastic.core.errors import MeshRefused, UsageError
from elastic.core.generation_spec import GenerationSpec
from elastic.core.settings import RunSettings
from elastic.engines.base import Config, EngineKind, Nonfinite, ResolvedConfig, UserObjects
from elastic.engines.deepspeed import monitors, startup, teardown, user_calls
from elastic.engines.deepspeed.adapter import DeepSpeedAdapter
from elastic.engines.deepspeed.belongings import Belongings
from elastic.engines.deepspeed.config import read_config, resolve
from elastic.engines.deepspeed.experts import config as experts
from elastic.engines.deepspeed.experts import native as native_experts
from elastic.engines.deepspeed.experts import native_placed
from elastic.engines.deepspeed.experts.native_passes import prepare
from elastic.engines.deepspeed.experts.native_rules import require_carriable as require_whole_layers
from elastic.engines.deepspeed.experts.optimizer import count_in_norm, groups_of_any_size, regrouped, require_groups
from elastic.engines.deepspeed.experts.placement import make_groups, refuse_unplaceable, require_experts
from elastic.engines.deepspeed.experts.recorders import table_by_names
from elastic.engines.deepspeed.fetch_order import forget_where_weights_are_found
from elastic.engines.deepspeed.layers import tensor_parallel
from elastic.engines.deepspeed.layers.cuts import noting_cuts
from elastic.engines.deepspeed.operators import build_ahead, forget_powers
from elastic.engines.deepspeed.pipeline import config as pipeline
from elastic.engines.deepspeed.pipeline import placed
from elastic.engines.deepspeed.pipeline.adapter import PipelineAdapter
from elastic.engines.deepspeed.pipeline.module import is_pipeline, require_carriable
from elastic.engines.deepspeed.refused import refuse_model, refuse_without_values, refuse_wrapped
from elastic.engines.deepspeed.state.muon import WholeMomentum, refuse_dependent
from elastic.engines.deepspeed.state.stage3 import gather_in_bundles


class DeepSpeed:
    """Implements `elastic.engines.base.EngineKind`."""

    name = "deepspeed"
    cuts_again = True

    def preload(self) -> None:
        startup.preload()
        # A forked process replaces its sys.stdout, and this handler keeps the one of now.
        messages_to_stderr()

    def warm_up(self, settings: RunSettings | None) -> None:
        startup.warm_up()
        if settings is not None:
            build_ahead(settings.engine_config)

    def device(self, local_rank: int) -> tuple[str, torch.device]:
        """As DeepSpeed's accelerator says: the variable DS_ACCELERATOR may choose another one than the machine has."""
        from deepspeed.accelerator import get_accelerator

        accelerator = get_accelerator()
        if accelerator.device_name() == "cpu":
            return "gloo", torch.device("cpu")
        return accelerator.communication_backend_name(), torch.device(accelerator.device_name(local_rank))

    def before_join(self) -> None:
        user_calls.group_comes()
        teardown.clear_stage3_globals()
        messages_to_stderr()

    def after_join(self, backend: str) -> None:
        import deepspeed

        # The group exists: DeepSpeed wraps it and never initialises one itself.
        deepspeed.comm.init_distributed(dist_backend=backend, dist_init_required=False, verbose=False)

    def destroy_groups(self) -> None:
        teardown.destroy_groups()

    def answer_user_calls(
        self,
        initialize: Callable[..., Any] | None,
        run_id: str,
        spec: Callable[[], GenerationSpec],
        engines_own: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        if initialize is None:
            user_calls.answer(None, None)
        else:
            monitors.name_run(run_id)
            user_calls.await_group(spec)
            user_calls.answer(
                initialize,
                lambda config: dict(self.resolve(config, spec()).native),
                lambda: spec().mesh,
                engines_own,
            )

    def resolve(self, config: Config | None, spec: GenerationSpec, loader_batch: int | None = None) -> ResolvedConfig:
        chosen = config if config is not None else spec.engine_config
        if chosen is None:
            raise UsageError(
                "no DeepSpeed configuration: pass config= to elastic.initialize, or give the job's `deepspeed`"
            )
        read = read_config(chosen)
        monitors.refuse_missing(read)
        for size in spec.tp_sizes:
            tensor_parallel.configured(read, size)
        mesh = spec.mesh
        most_cells = max(spec.max_world_size, spec.world_size) // mesh.per_cell
        sizes = (mesh.per_cell, mesh.tp, mesh.ep, spec.ep_changes, mesh.pp)
        found = resolve(read, spec.batch, mesh.dp, most_cells, loader_batch, *sizes)
        begins = spec.checkpoint is None
        return replace(
            found, begins=begins, sp=mesh.sp, tp_sizes=spec.tp_sizes, any_tp=spec.any_tp, ep_sizes=spec.ep_sizes
        )

    def build(
        self,
        resolved: ResolvedConfig,
        nonfinite: Nonfinite | None,
        device: torch.device,
        objects: UserObjects,
        layer_group: dist.ProcessGroup | None = None,
    ) -> tuple[DeepSpeedAdapter, Any, Any]:
        """AutoTP makes the group of `layer_group`'s ranks itself."""
        if placed.is_released(objects.model):
            placed.place_again(objects.model, user_calls.mesh())
        if resolved.shares_change and native_experts.layers_of(objects.model):
            objects = native_placed.place_again(objects.model, objects, user_calls.mesh().ep)
        _refuse(resolved, objects)
        config = native_experts.configured(objects.model, resolved.native)
        form = _Form.of(objects.model, resolved.native, config)
        form.require(resolved, objects)
        if form.staged:
            objects = placed.of_stage(objects.model, objects)
        belongings = Belongings(objects.model, objects, resolved.shares_change)
        try:
            with belongings.keeping_objects():
                native, wrapped, scheduler, cuts = _initialized(resolved, objects, config, form)
        except BaseException as error:
            # A peer was lost, say: the next generation builds on the same model.
            belongings.failed()
            if form.staged:
                placed.release(objects.model)
            teardown.clear_stage3_globals()
            if refusal := form.refusal(error):
                # What AutoTP does not like may be the number of workers.
                raise (MeshRefused if form.tp > 1 else UsageError)(refusal) from error
            raise
        try:
            belongings.require_kept()
            form.require_built(native.module)
            refuse_dependent(native, resolved.tp_sizes)
            engine = (
                PipelineAdapter(native, nonfinite, belongings)
                if form.staged
                else DeepSpeedAdapter(native, nonfinite, belongings, cuts)
            )
        except UsageError:
            teardown.release_engine(native)
            # Where only this mesh is refused, the next generation builds on the same model.
            belongings.failed()
            raise
        if form.layered:
            prepare(native, form.shared)
        stage3 = native.zero_optimization_stage() == 3
        if form.ep and form.tp > 1 and not stage3:
            count_in_norm(native.optimizer)
        if stage3:
            gather_in_bundles(native.optimizer)
            forget_where_weights_are_found(native.optimizer.parameter_offload)
        WholeMomentum.take_over(native.optimizer)
        belongings.built(native)
        forget_powers(native.basic_optimizer)
        engine.count_collectives()
        engine.ledger.remark = resolved.said
        return engine, wrapped, scheduler


@dataclass(frozen=True)
class _Form:
    """What DeepSpeed makes of a model beyond data parallelism. `tp` ranks share each layer, `ep` ranks AutoEP's experts
    (0: it has none); `layered`: it has native layers of experts, which are `shared` out; `staged`: it is a pipeline."""

    tp: int
    ep: int
    layered: bool
    shared: bool
    staged: bool

    @classmethod
    def of(cls, model: Any, given: Mapping[str, Any], config: Mapping[str, Any]) -> _Form:
        """`given`: the configuration with the job's mesh; `config`: what DeepSpeed gets of it."""
        layered = bool(native_experts.layers_of(model))
        return cls(
            tensor_parallel.size_of(given),
            experts.size_of(config),
            layered,
            bool(experts.size_of(given)),
            is_pipeline(model),
        )

    @property
    def has_experts(self) -> bool:
        return bool(self.ep) or self.layered

    @property
    def whole(self) -> bool:
        """The model stays as it is."""
        return self.tp == 1 and not self.has_experts and not self.staged

    def require(self, resolved: ResolvedConfig, objects: UserObjects) -> None:
        """Raises UsageError for what this form cannot be made of."""
        if self.staged:
            require_carriable(objects.model)
            pipeline.require_stage(resolved.native)
        most = max((self.tp, *resolved.tp_sizes))
        if most > 1:
            tensor_parallel.refuse_unshardable(objects.model, most)
        if self.tp > 1 and (resolved.native.get("zero_optimization") or {}).get("stage") == 3:
            # It fails where a worker has nothing, before the slices can be looked at, and there alone.
            tensor_parallel.require_heads(objects.model, self.tp)
        if self.ep:
            refuse_unplaceable(objects.model)
        if self.has_experts:
            require_groups(objects, self.layered, resolved.shares_change)

    def require_built(self, module: Any) -> None:
        """Raises UsageError where DeepSpeed has left a part as it was."""
        if self.tp > 1:
            tensor_parallel.require_slices(module, self.tp)
            tensor_parallel.require_even_slices(module, self.tp)
        if self.ep:
            require_experts(module)

    def refusal(self, error: BaseException) -> str | None:
        """What DeepSpeed says of the model, as a sentence; None for every other error."""
        if self.ep and isinstance(error, ValueError):
            return f"DeepSpeed's AutoEP refuses this model or its configuration: {error}"
        if self.tp > 1 and isinstance(error, (ValueError, NotImplementedError, AssertionError)):
            return f"DeepSpeed's AutoTP refuses this model or its configuration: {error}"
        return None


def _refuse(resolved: ResolvedConfig, objects: UserObjects) -> None:
    tensor_parallel.refuse_plan(objects.tp_plan)
    if objects.pipeline is not None:
        raise UsageError(
            "pipeline= is for engine: fsdp2; with DeepSpeed give a deepspeed.pipe.PipelineModule as the model"
        )
    if isinstance(objects.optimizer, (list, tuple)) or isinstance(objects.lr_scheduler, (list, tuple)):
        raise UsageError("several optimizers, or schedulers, are for engine: fsdp2; DeepSpeed's engine has one of each")
    refuse_model(objects.model)
    refuse_without_values(objects.model, resolved.begins)
    refuse_wrapped(objects.model, resolved.native)
    require_whole_layers(objects.model, resolved.native)


def _initialized(
    resolved: ResolvedConfig, objects: UserObjects, config: dict[str, Any], form: _Form
) -> tuple[Any, Any, Any, Any]:
    """DeepSpeed's engine, optimizer and scheduler, and how its layers were cut (None: they were not)."""
    import deepspeed

    values = startup.values_come_later() if form.whole and not resolved.begins else contextlib.nullcontext()
    noting = noting_cuts(form.tp) if form.tp > 1 else contextlib.nullcontext()
    if form.ep > 1 and form.tp == 1:
        make_groups(form.ep, resolved.sp)
    with (
        user_calls.building(),
        startup.named_by_shape(),
        startup.nothing_walked(),
        table_by_names(),
        groups_of_any_size(resolved.shares_change),
        values,
        noting as cuts,
    ):
        native, wrapped, _, scheduler = deepspeed.initialize(
            model=objects.model,
            optimizer=regrouped(objects, form.layered) if form.has_experts else objects.optimizer,
            lr_scheduler=objects.lr_scheduler,
            model_parameters=objects.model_parameters,
            config=config,
            dist_init_required=False,
        )
    return native, wrapped, scheduler, cuts


def messages_to_stderr() -> None:
    """Standard output carries data, standard error carries messages."""
    for handler in logging.getLogger("DeepSpeed").handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
            handler.setStream(sys.stderr)


KIND: EngineKind = DeepSpeed()
