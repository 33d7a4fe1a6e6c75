"""Weights of a Trainer's model that no rank has whole: under ZeRO stage 3, with FSDP2, or where ranks share layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from elastic.integrations.engine_config import spec_of_generation
from elastic.training.engine import ElasticEngine
from elastic.training.saving import save_pretrained


def by_stage_3(engine: Any) -> bool:
    """Of an engine; not of the model, where there is none yet."""
    return isinstance(engine, ElasticEngine) and _by_deepspeed(engine) and engine.zero_optimization_stage() == 3


def _by_deepspeed(engine: ElasticEngine) -> bool:
    return hasattr(engine, "zero_optimization_stage")


def everywhere(engine: ElasticEngine) -> bool:
    """Has each rank all weights?"""
    return save_pretrained.everywhere(engine, spec_of_generation())


@contextmanager
def told_of(engine: Any) -> Iterator[None]:
    """Under ZeRO stage 3: libraries ask transformers for it, to gather a weight that they use outside of its module,
    and to have ranks generate until the last of them is done. Of FSDP2's models they know by themselves."""
    # Not at the top: whose import fails says which extra is missing.
    from transformers.integrations import deepspeed as integration

    if not by_stage_3(engine) or integration.is_deepspeed_zero3_enabled():
        yield
        return
    # It is known for as long as this is there. A model that is made meanwhile is partitioned as it is made.
    told = integration.HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    try:
        yield
    finally:
        del told
        integration.unset_hf_deepspeed_config()


def mark_others(engine: Any, held: Iterable[Any]) -> None:
    """Under ZeRO stage 3 TRL asks of every weight by itself whether it is whole: those of models that the engine does
    not train, as a reference, are."""
    if not by_stage_3(engine):
        return
    # DeepSpeed's enumeration.
    status = type(next(engine.module.parameters()).ds_status)
    models = [each for each in held if isinstance(each, torch.nn.Module)]
    for parameter in (parameter for model in models for parameter in model.parameters()):
        if not hasattr(parameter, "ds_id"):
            vars(parameter)["ds_status"] = status.AVAILABLE
