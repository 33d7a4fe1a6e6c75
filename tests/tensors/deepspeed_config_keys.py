"""The keys that the installed DeepSpeed reads from its configuration, as DeepSpeed itself shows them.

Two sources. Sections that DeepSpeed parses with pydantic models name their fields. For everything else DeepSpeed's own
`DeepSpeedConfig` is run over a dictionary that notes every key it is asked for.

    python tests/tensors/deepspeed_config_keys.py elastic/engines/deepspeed/config_keys.json

writes the table that the job checks use, which must not import torch. `test_config_keys.py` compares the two.
"""

from __future__ import annotations

import inspect
import json
import sys
import typing
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from pydantic import BaseModel, ValidationError

Keys = dict[str, Any]

_UNKNOWN = "?"
# What `deepspeed.initialize` reads before and next to DeepSpeedConfig (deepspeed/__init__.py and runtime/engine.py).
_ELSEWHERE = ("data_parallel_size", "sequence_parallel_size", "vocabulary_size")
# DeepSpeed hands these on to whatever the user names, or copies them whole.
_FREE = ("params", "data_efficiency", "pipeline", "metrics")


class Asked(dict[str, Any]):
    """A dictionary that is empty but for `items`, and notes every key that it is asked for."""

    def __init__(self, *items: tuple[str, Any]) -> None:
        super().__init__(items)
        self.asked: dict[str, None] = {}

    def __contains__(self, key: object) -> bool:
        self.asked[str(key)] = None
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.asked[key] = None
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked[key] = None
        return super().get(key, default)

    def keys(self) -> Any:
        return self

    def __copy__(self) -> Asked:
        return self


def deepspeed_keys() -> Keys:
    """Nested: null stands for a key without keys of its own, or with any."""
    top = Asked(("train_batch_size", 1))
    _parse(top)
    names = [*top.asked, *_ELSEWHERE]
    keys = {name: _section(name) for name in sorted(names)}
    keys["optimizer"]["params"] = {_UNKNOWN: _parameters(_optimizers())}
    keys["scheduler"]["params"] = {_UNKNOWN: _parameters(_schedulers())}
    return keys


def as_text(keys: Keys) -> str:
    return json.dumps(keys, indent=1, sort_keys=True) + "\n"


def _section(name: str) -> Keys | None:
    """The keys below top-level key `name`."""
    if name in _FREE:
        return None
    section = Asked((_UNKNOWN, 0), ("type", "x"))
    error = _parse(Asked(("train_batch_size", 1), (name, section)))
    section.pop("type")
    if not isinstance(error, ValidationError):
        error = _parse(Asked(("train_batch_size", 1), (name, section))) or error
    asked = {key for key in section.asked if key != _UNKNOWN}
    if isinstance(error, ValidationError):
        model = _at(_model(error.title), [part for part in error.errors()[0]["loc"] if part in (name,)])
        return _fields(model)
    return {key: _subsection(name, key) for key in sorted(asked)} or None


def _subsection(name: str, key: str) -> Keys | None:
    if key in _FREE:
        return None
    section = Asked((_UNKNOWN, 0))
    error = _parse(Asked(("train_batch_size", 1), (name, Asked((key, section)))))
    if isinstance(error, ValidationError):
        return _fields(_at(_model(error.title), [part for part in error.errors()[0]["loc"] if part == key]))
    return {below: None for below in sorted(section.asked) if below != _UNKNOWN} or None


def _parse(config: Asked) -> Exception | None:
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        DeepSpeedConfig(config)
    except Exception as error:  # noqa: BLE001 - most sections do not like what they are given; what they asked counts
        return error
    return None


def _model(title: str) -> type[BaseModel]:
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    return next(model for model in _below(DeepSpeedConfigModel) if model.__name__ == title)


def _below(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for child in model.__subclasses__():
        yield from _below(child)


def _at(model: type[BaseModel], path: list[Any]) -> type[BaseModel]:
    for part in path:
        inner = _inner(model.model_fields[part].annotation) if part in model.model_fields else None
        model = inner or model
    return model


def _fields(model: type[BaseModel]) -> Keys:
    found: Keys = {}
    for name, field in model.model_fields.items():
        inner = _inner(field.annotation)
        below = _fields(inner) if inner is not None and name not in _FREE else None
        found[name] = below
        if field.alias is not None:
            found[field.alias] = below
    return dict(sorted(found.items()))


def _inner(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for found in map(_inner, typing.get_args(annotation)) if found is not None), None)


def _optimizers() -> dict[str, list[Any]]:
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    adam = [DeepSpeedCPUAdam, FusedAdam, torch.optim.Adam, torch.optim.AdamW]
    known = {
        "adam": adam,
        "adamw": adam,
        "adagrad": [DeepSpeedCPUAdagrad, torch.optim.Adagrad],
        "lamb": [FusedLamb],
        "lion": [DeepSpeedCPULion, FusedLion],
    }
    torchs = inspect.getmembers(torch.optim, lambda kind: inspect.isclass(kind) and kind is not torch.optim.Optimizer)
    # DeepSpeed's own that are made of packages next to it: their parameters are not known here.
    others: dict[str, list[Any]] = {name: [] for name in DEEPSPEED_OPTIMIZERS}
    return {name: [kind] for name, kind in torchs if issubclass(kind, torch.optim.Optimizer)} | others | known


def _schedulers() -> dict[str, list[Any]]:
    from deepspeed.runtime import lr_schedules

    named = {name: [getattr(lr_schedules, name)] for name in lr_schedules.VALID_LR_SCHEDULES}
    torchs = inspect.getmembers(torch.optim.lr_scheduler, inspect.isclass)
    base = torch.optim.lr_scheduler.LRScheduler
    return {name: [kind] for name, kind in torchs if issubclass(kind, base) and kind is not base} | named


def _parameters(kinds: dict[str, list[Any]]) -> dict[str, list[str] | None]:
    found: dict[str, list[str] | None] = {}
    for name, classes in sorted(kinds.items()):
        names: set[str] = set()
        for kind in classes:
            with suppress(ValueError):
                names |= set(inspect.signature(kind).parameters)
        # Read by DeepSpeed itself before the optimizer is made (runtime/engine.py, _configure_basic_optimizer).
        own = {"torch_adam", "adam_w_mode", "max_grad_norm"} if name in ("adam", "adamw") else set()
        found[name] = sorted((names | own) - {"params", "model_params", "optimizer", "kwargs"}) or None
    return found


if __name__ == "__main__":
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        file.write(as_text(deepspeed_keys()))
