"""What modules keep next to tensors: `get_extra_state` and `set_extra_state` of torch's nn.Module."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

import torch

from elastic.core.checkpoint.manifest import Json
from elastic.core.errors import ModelMismatch
from elastic.engines.json_values import decode, encode
from elastic.engines.model.plain_names import named_modules

logger = logging.getLogger(__name__)


def read_modules(model: torch.nn.Module) -> dict[str, Json]:
    """JSON by module name. As with buffers, those of rank 0 are the run's.

    Raises UsageError, naming the module, for what JSON cannot hold.
    """
    return {
        name: encode(module.get_extra_state(), f"the extra state of module {name or 'the model'!r}")
        for name, module in _with_extra(model)
    }


def install_modules(model: torch.nn.Module, saved: Mapping[str, Json] | None) -> None:
    """The inverse. None: a checkpoint that was made before extra state was saved. Raises ModelMismatch where the
    checkpoint's modules are others."""
    modules = dict(_with_extra(model))
    if saved is None:
        if modules:
            logger.warning("the checkpoint has no extra state of modules: %s begin anew", sorted(modules))
        return
    if set(saved) != set(modules):
        raise ModelMismatch(
            f"the checkpoint has extra state of the modules {sorted(saved)}, this model has it in {sorted(modules)}"
        )
    for name, module in modules.items():
        module.set_extra_state(decode(saved[name]))


def _with_extra(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    base = torch.nn.Module.get_extra_state
    return ((name, module) for name, module in named_modules(model) if type(module).get_extra_state is not base)
