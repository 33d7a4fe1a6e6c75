"""What a checkpoint says of its model besides tensors, so that it can be exported without the code that built it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from elastic.core.checkpoint.manifest import Json
from elastic.engines.model.plain_names import named_buffers, named_modules, named_parameters, unwrapped

logger = logging.getLogger(__name__)


def describe(model: torch.nn.Module) -> dict[str, Json]:
    """`class`; `aliases`: every further name of a shared (tied) tensor -> its first; `hugging_face`, see below;
    `adapters`: names of PEFT's, where the model has any.

    `hugging_face` is None, or the configuration of the first Hugging Face model in `model`, with the `prefix` of its
    names ("" for the model itself, else for example "lm."). transformers is not imported.
    """
    said: dict[str, Json] = {
        "class": type(unwrapped(model)).__qualname__,
        "aliases": aliases(model),
        "hugging_face": _hugging_face(model),
    }
    adapters = _adapters(model)
    return {**said, "adapters": adapters} if adapters else said


def aliases(model: torch.nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer of the state_dict that is not the one torch lists first -> that one."""
    found: dict[str, str] = {}
    for named in (
        named_parameters(model, remove_duplicate=False),
        named_buffers(model, remove_duplicate=False),
    ):
        first: dict[int, str] = {}
        for name, tensor in named:
            if first.setdefault(id(tensor), name) != name:
                found[name] = first[id(tensor)]
    return found


def _adapters(model: torch.nn.Module) -> list[str]:
    found: set[str] = set()
    for _, module in named_modules(model):
        given = getattr(module, "peft_config", None)
        found |= set(map(str, given)) if isinstance(given, Mapping) else set()
    return sorted(found)


def _hugging_face(model: torch.nn.Module) -> Json:
    for name, module in named_modules(model):
        config: Any = getattr(module, "config", None)
        if not (hasattr(module, "save_pretrained") and hasattr(config, "to_json_string")):
            continue
        try:
            said = dict(_texts(module, config))
        except Exception as error:  # noqa: BLE001 - foreign code; only an export without --config would miss it
            logger.warning("the configuration of %s is not kept in checkpoints: %s", type(module).__qualname__, error)
            return None
        return {"prefix": f"{name}." if name else "", **said}
    return None


def _texts(module: Any, config: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    # As `save_pretrained` does: the Auto classes choose the class by it.
    yield "config", {**json.loads(config.to_json_string()), "architectures": [type(module).__name__]}
    generation: Any = getattr(module, "generation_config", None)
    if hasattr(generation, "to_json_string"):
        yield "generation_config", json.loads(generation.to_json_string())
