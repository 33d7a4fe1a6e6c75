"""An engine of a worker that trains by itself, on a model and an optimizer that another engine will be built on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from elastic.checkpoint.memory.limits import available_bytes
from elastic.comm.rendezvous import host_store
from elastic.core.errors import UsageError
from elastic.core.generation_spec import GenerationSpec
from elastic.engines.base import Engine, EngineKind, UserObjects
from elastic.training.generation import Generation
from elastic.training.in_loop.assembly import Given, copied
from elastic.training.in_loop.rehearsal import NoRoom
from elastic.training.local import SilentCoordinator

# Weights twice, their masters, gradients and moments, and as much again for what is computed.
_BYTES_EACH = 2 * 20


@contextmanager
def engine_alone(kind: EngineKind, spec: GenerationSpec, given: Given) -> Iterator[Engine]:
    """Afterwards model and optimizer are given back, without their values.

    Raises NoRoom, before anything is built, for a model whose state is too much for one worker; UsageError where the
    model is not given back; and what building an engine raises."""
    generation = Generation(spec, SilentCoordinator(), host_store("127.0.0.1"), kind=kind)
    try:
        generation.join()
        _require_room(given.model, generation.scope.device)
        resolved = kind.resolve(given.config, spec, given.source.micro_batch)
        objects = UserObjects(given.model, given.optimizer, None, copied(given.model_parameters), given.tp_plan, None)
        engine, _, _ = kind.build(resolved, None, generation.scope.device, objects)
        generation.own(engine)
        yield engine
        if (obstacle := engine.obstacle()) is not None:
            raise UsageError(f"the model is not given back: {obstacle}")
    finally:
        generation.close(stays=True)


def _require_room(model: torch.nn.Module, device: torch.device) -> None:
    needed = _BYTES_EACH * sum(parameter.numel() for parameter in model.parameters())
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()
    if needed > free:
        raise NoRoom(f"one worker alone would need {needed / 1e9:.1f} GB of memory, and has {free / 1e9:.1f} GB")
