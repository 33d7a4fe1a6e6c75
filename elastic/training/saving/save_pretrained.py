"""`save_pretrained` of transformers and PEFT for the model that is trained, where no worker has all of its weights.

They write what they find in their process: empty tensors under ZeRO stage 3, slices of layers with `tp`; of FSDP2's
they cannot. Here the weights are gathered first. Other models, and calls that are given a `state_dict`, are theirs.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from elastic.core.errors import UsageError
from elastic.core.generation_spec import GenerationSpec
from elastic.engines.when_imported import when_imported
from elastic.training import context
from elastic.training.busy import reporting
from elastic.training.engine import ElasticEngine

logger = logging.getLogger(__name__)

_CLASSES = {"transformers.modeling_utils": "PreTrainedModel", "peft.peft_model": "PeftModel"}
# Ranks that wait for rank 0's files are no hang.
_LIMIT_S = 3600.0


@functools.cache
def gather_first() -> None:
    """From here on, in this process."""
    for module, name in _CLASSES.items():
        when_imported(module, functools.partial(_wrap, name=name), "save_pretrained")


def everywhere(engine: ElasticEngine, spec: GenerationSpec) -> bool:
    """Has each rank all weights, as tensors of their own shapes?"""
    stage = getattr(engine, "zero_optimization_stage", None)
    return stage is not None and stage() < 3 and spec.tp * spec.ep == 1


def whole_state(engine: ElasticEngine, module: torch.nn.Module, prefix: str = "") -> dict[str, Any]:
    """The state_dict of `module`, whose tensors have names that begin with `prefix` in the engine's: on rank 0, in host
    memory; on other ranks empty. Collective."""
    weights = engine.whole_weights()
    if not weights:
        return {}
    found: dict[str, Any] = {
        name.removeprefix(prefix): each for name, each in weights.items() if name.startswith(prefix)
    }
    # What modules keep beside tensors is in each rank's own, where weights are parts or empty.
    own = module.state_dict().items()
    return found | {name: value for name, value in own if name.rpartition(".")[2] == "_extra_state"}


def _wrap(module: ModuleType, name: str) -> None:
    kind = getattr(module, name)
    kind.save_pretrained = _gathering(kind.save_pretrained)


def _gathering(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_pretrained(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        generation = context.current()
        engine = None if generation is None else generation.engine
        if generation is None or engine is None or _named(given, "state_dict") is not None:
            return original(self, *args, **kwargs)
        spec = generation.scope.spec
        name = None if everywhere(engine, spec) else _place(self, engine.module)
        if name is None:
            return original(self, *args, **kwargs)
        if _named(given, "is_main_process") is None:
            raise UsageError(_ASKED.format(kind=type(self).__name__))
        if generation.loader is not None:
            generation.loader.leave_together()
        with reporting(generation.scope, "saving the model", _LIMIT_S):
            weights = whole_state(engine, self, f"{name}." if name else "")
            if weights:
                return original(self, *args, **{**kwargs, "state_dict": weights})
        if given.arguments["is_main_process"]:
            logger.warning(
                "save_pretrained(%r) writes nothing on rank %d, which is no main process here: the weights are whole "
                "on rank 0 alone", given.arguments["save_directory"], spec.rank,
            )  # fmt: skip
        return None

    return save_pretrained


_ASKED = (
    "{kind}.save_pretrained: the weights are on several workers, which gather them all together. Call it on all of "
    "them with is_main_process=(elastic.get_context().rank == 0), or accelerator.is_main_process; or with state_dict=, "
    "which is engine.whole_weights() or accelerator.get_state_dict(model), called on all of them"
)


def _named(given: inspect.BoundArguments, name: str) -> Any:
    """PEFT takes a state_dict among others."""
    return {**given.arguments.get("kwargs", {}), **given.arguments}.get(name)


def _place(model: torch.nn.Module, trained: torch.nn.Module) -> str | None:
    """The name of `model` within the one that is trained: itself "". None: it is another one. Raises UsageError where
    it has parameters of that."""
    name = next((name for name, module in trained.named_modules() if module is model), None)
    if name is None:
        ours = set(trained.parameters())
        if any(parameter in ours for parameter in model.parameters()):
            raise UsageError(
                f"{type(model).__name__}.save_pretrained: the weights are on several workers, and the model holds the "
                "one that is trained: give it state_dict=, from engine.whole_weights()"
            )
    return name
