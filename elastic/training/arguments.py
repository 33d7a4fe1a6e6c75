"""The arguments of `deepspeed.initialize` that concern ranks and configuration: used, or refused by name."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from elastic.core.errors import UsageError
from elastic.core.generation_spec import GenerationSpec
from elastic.core.settings import WeightsSettings
from elastic.engines.base import Config

logger = logging.getLogger(__name__)

# torch's own default, which DeepSpeed's signature has too.
_DEFAULT_PORT = 29500


def chosen_config(args: Any, config: Config | None, config_params: Config | None) -> Config | None:
    """The one configuration that was given, by any of DeepSpeed's three ways. None: the job's own.

    Raises UsageError where it was given twice.
    """
    given = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
    }
    found = {name: value for name, value in given.items() if value is not None}
    if len(found) > 1:
        raise UsageError(f"the DeepSpeed configuration was given as {' and as '.join(found)}; give it once")
    return next(iter(found.values()), None)


def chosen_weights(
    weights: str | os.PathLike[str] | Mapping[str, Any] | None, spec: GenerationSpec
) -> WeightsSettings | None:
    """What a new run begins with: the argument of `initialize`, or the job's. Raises UsageError where they differ."""
    if weights is None:
        return spec.weights
    data = dict(weights) if isinstance(weights, Mapping) else {"source": os.fspath(weights)}
    source = data.get("source")
    if not isinstance(source, (str, os.PathLike)):
        raise UsageError("elastic.initialize: weights needs a `source`, the folder of the weights")
    if "://" not in os.fspath(source):
        data["source"] = os.path.abspath(os.path.expanduser(source))
    given = WeightsSettings.from_json(data)
    if spec.weights is not None and spec.weights != given:
        raise UsageError(
            f"the weights to begin with were given to elastic.initialize ({given.source}) and by the job "
            f"({spec.weights.source}); give them once"
        )
    return given


def refuse_arguments(args: Any, model: Any, mpu: Any, mesh_param: Any, distributed_port: int) -> None:
    """Raise UsageError for what binds a run to one set of ranks.

    `dist_init_required` needs no answer: the processes are connected already, and DeepSpeed is told so.
    """
    if hasattr(args, "named_parameters"):
        raise UsageError(
            "the first argument of elastic.initialize is `args`, as in deepspeed.initialize; pass the model as model="
        )
    if model is None:
        raise UsageError("elastic.initialize needs a model: pass model=")
    if mpu is not None:
        raise UsageError(
            "elastic.initialize: mpu is not supported; leave it out; the job's mesh: {sp: N} shares sequences"
        )
    if mesh_param is not None:
        raise UsageError("elastic.initialize: mesh_param is not supported, the platform makes the mesh; leave it out")
    if distributed_port != _DEFAULT_PORT:
        logger.warning("distributed_port=%d is not used: the platform connects the workers", distributed_port)
