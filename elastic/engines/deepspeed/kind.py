"""`EngineKind` of DeepSpeed: what a process needs before its first engine, and around the groups of each generation."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import torch

from elastic.core.errors import UsageError
from elastic.core.generation_spec import GenerationSpec
from elastic.core.settings import RunSettings
from elastic.engines.base import Config, EngineKind, Nonfinite, ResolvedConfig, UserObjects
from elastic.engines.deepspeed import monitors, startup, teardown, tensor_parallel, user_calls
from elastic.engines.deepspeed.adapter import DeepSpeedAdapter
from elastic.engines.deepspeed.belongings import Belongings, fill_placeholders
from elastic.engines.deepspeed.config import read_config, resolve
from elastic.engines.deepspeed.operators import build_ahead
from elastic.engines.deepspeed.refused import refuse_model, refuse_without_values, refuse_wrapped


class DeepSpeed:
    """Implements `elastic.engines.base.EngineKind`."""

    name = "deepspeed"

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
        self, initialize: Callable[..., Any] | None, run_id: str, spec: Callable[[], GenerationSpec]
    ) -> None:
        if initialize is None:
            user_calls.answer(None, None)
        else:
            monitors.name_run(run_id)
            user_calls.await_group(spec)
            user_calls.answer(initialize, lambda config: dict(self.resolve(config, spec()).native))

    def resolve(self, config: Config | None, spec: GenerationSpec, loader_batch: int | None = None) -> ResolvedConfig:
        chosen = config if config is not None else spec.engine_config
        if chosen is None:
            raise UsageError(
                "no DeepSpeed configuration: pass config= to elastic.initialize, or give the job's `deepspeed`"
            )
        read = read_config(chosen)
        monitors.refuse_missing(read)
        mesh = spec.mesh
        most_cells = max(spec.max_world_size, spec.world_size) // mesh.per_cell
        return resolve(read, spec.batch, mesh.dp, most_cells, loader_batch, mesh.per_cell, mesh.tp)

    def build(
        self, resolved: ResolvedConfig, nonfinite: Nonfinite | None, device: torch.device, objects: UserObjects
    ) -> tuple[DeepSpeedAdapter, Any, Any]:
        import deepspeed

        refuse_model(objects.model)
        refuse_without_values(objects.model)
        refuse_wrapped(objects.model, resolved.native)
        tp = tensor_parallel.size_of(resolved.native)
        if tp > 1:
            tensor_parallel.refuse_unshardable(objects.model)
        fill_placeholders(objects.model)
        belongings = Belongings(objects.model, objects.optimizer)
        try:
            with user_calls.building():
                native, wrapped, _, scheduler = deepspeed.initialize(
                    model=objects.model,
                    optimizer=objects.optimizer,
                    lr_scheduler=objects.lr_scheduler,
                    model_parameters=objects.model_parameters,
                    config=dict(resolved.native),
                    dist_init_required=False,
                )
        except BaseException:
            # A peer was lost, say: the next generation builds on the same model, unless its layers have been replaced.
            if tp == 1:
                belongings.failed()
            teardown.clear_stage3_globals()
            raise
        try:
            if tp > 1:
                tensor_parallel.require_slices(native.module, tp)
            engine = DeepSpeedAdapter(native, nonfinite, belongings)
        except UsageError:
            teardown.release_engine(native)
            raise
        belongings.built(native)
        engine.count_collectives()
        return engine, wrapped, scheduler


def messages_to_stderr() -> None:
    """Standard output carries data, standard error carries messages."""
    for handler in logging.getLogger("DeepSpeed").handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
            handler.setStream(sys.stderr)


KIND: EngineKind = DeepSpeed()
