"""What a checkpoint says of its model besides tensors, so that it can be exported without the code that built it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from elastic.core.checkpoint.manifest import Json
from elastic.engines.model.plain_names import named_buffers, named_modules, named_parameters, plain, unwrapped

logger = logging.getLogger(__name__)


def describe(model: torch.nn.Module) -> dict[str, Json]:
    """`class`; `aliases`: every further name of a shared (tied) tensor -> its first; `hugging_face`, see below;
    `adapters`: PEFT's, by name, where the model has any, see `_adapter`.

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


def _adapters(model: torch.nn.Module) -> dict[str, Json]:
    for place, module in named_modules(model):
        given = getattr(module, "peft_config", None)
        if isinstance(given, Mapping):
            return {str(name): _adapter(module, f"{place}." if place else "", str(name)) for name in given}
    return {}


def _adapter(model: Any, prefix: str, name: str) -> Json:
    """`config`, as in PEFT's adapter_config.json, and `weights`: what its file calls a tensor -> the tensor's name.
    Asked of PEFT itself, which `model` is made with. None where it has no answer in these terms."""
    from peft import get_peft_model_state_dict

    # No tensor of the model is touched: they may be partitioned. What PEFT takes of these is told by their identity.
    asked = {key: torch.empty(0) for key, _ in (*model.named_parameters(), *model.named_buffers())}
    own = {id(tensor): plain(key) for key, tensor in asked.items()}
    try:
        # Whether to keep the embeddings it would ask a hub. An export sees what would be left out.
        found = get_peft_model_state_dict(model, asked, name, save_embedding_layers=False)
        weights = {f"{_before(model)}{plain(key)}": f"{prefix}{own[id(tensor)]}" for key, tensor in found.items()}
        return {"config": _configuration(model, name), "weights": weights}
    except Exception as error:  # noqa: BLE001 - foreign code; only an export of the adapter would miss it
        logger.warning("the adapter %s is not described in checkpoints: %s: %s", name, type(error).__name__, error)
        return None


def _before(model: Any) -> str:
    """Of names in an adapter's file, where transformers' own integration has made it, without a PeftModel."""
    return "" if hasattr(model, "get_base_model") else "base_model.model."


def _configuration(model: Any, name: str) -> Json:
    said = {**model.peft_config[name].to_dict(), "inference_mode": True}
    if said.get("task_type") is None and hasattr(model, "get_base_model"):
        base = type(model.get_base_model())
        said["auto_mapping"] = {"base_model_class": base.__name__, "parent_library": base.__module__}
    found: Json = json.loads(json.dumps(said, default=sorted))
    return found


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
