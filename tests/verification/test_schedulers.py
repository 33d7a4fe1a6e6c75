"""The verification compares a scheduler's state with the saved one: every scheduler must return what it was given."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

from elastic.engines.deepspeed import extra_state
from elastic.engines.deepspeed.state.live_numbers import expected_numbers
from elastic.engines.json_values import decode
from elastic.training.state.verify_scalars import wrong_rest

pytestmark = pytest.mark.filterwarnings("ignore")

MAKERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: schedulers.LambdaLR(o, [lambda step: 0.9**step, lambda step: 0.5**step]),
    "multiplicative": lambda o: schedulers.MultiplicativeLR(o, lambda step: 0.95),
    "step": lambda o: schedulers.StepLR(o, 2),
    "multi-step": lambda o: schedulers.MultiStepLR(o, [2, 3, 3, 9]),
    "constant": lambda o: schedulers.ConstantLR(o, total_iters=3),
    "linear": lambda o: schedulers.LinearLR(o, total_iters=9),
    "exponential": lambda o: schedulers.ExponentialLR(o, 0.9),
    "polynomial": lambda o: schedulers.PolynomialLR(o, total_iters=9),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 9),
    "restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2, 2),
    "one-cycle": lambda o: schedulers.OneCycleLR(o, [0.3, 0.1], total_steps=20),
    "cyclic": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=2, cycle_momentum=False),
    "plateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1),
    "sequential": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, total_iters=2), schedulers.CosineAnnealingLR(o, 9)], [2]
    ),
    "chained": lambda o: schedulers.ChainedScheduler([schedulers.StepLR(o, 2), schedulers.ExponentialLR(o, 0.9)]),
    "deepspeed-warmup": lambda o: _deepspeed("WarmupLR")(o, warmup_num_steps=4),
    "deepspeed-decay": lambda o: _deepspeed("WarmupDecayLR")(o, total_num_steps=20, warmup_num_steps=4),
    "deepspeed-cosine": lambda o: _deepspeed("WarmupCosineLR")(o, total_num_steps=20, warmup_num_steps=4),
    "deepspeed-cycle": lambda o: _deepspeed("OneCycle")(o, 0.01, 0.1, cycle_first_step_size=4),
}


@pytest.mark.parametrize("name", list(MAKERS))
def test_what_was_saved_is_found_again(name: str) -> None:
    used = _stepped(MAKERS[name], 5)
    saved = _extra_of(used)
    fresh = _stepped(MAKERS[name], 0)
    assert _wrong(fresh, saved) == {"learning-rate scheduler"}
    fresh.load_state_dict(decode(saved["scheduler"]["state"]))
    assert _wrong(fresh, saved) == set()


def _wrong(scheduler: Any, saved: dict[str, Any]) -> set[str]:
    engine = _engine(scheduler)
    wrong = wrong_rest(extra_state.read(engine), expected_numbers(engine, saved))
    return {name for name, flag in wrong.items() if flag}


def _stepped(make: Callable[[Any], Any], steps: int) -> Any:
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [p], "lr": 0.1 * (1 + n)} for n, p in enumerate(parameters)], momentum=0.9)
    scheduler = make(optimizer)
    for step in range(steps):
        optimizer.step()
        # Only one of them asks for a loss.
        scheduler.step(*([float(step)] if isinstance(scheduler, schedulers.ReduceLROnPlateau) else []))
    return scheduler


def _engine(scheduler: Any) -> Any:
    """As much of an engine as is looked at."""
    counters = dict.fromkeys(("global_steps", "global_samples", "skipped_steps", "micro_steps"), 3)
    return SimpleNamespace(
        lr_scheduler=scheduler,
        optimizer=SimpleNamespace(),
        module=torch.nn.Module(),
        managed_gradient_accumulation=lambda: False,
        **counters,
    )


def _extra_of(scheduler: Any) -> dict[str, Any]:
    counters = dict.fromkeys(("global_steps", "global_samples", "skipped_steps", "micro_steps"), 3)
    saved = {
        "engine": counters,
        "loss_scaler": {"kind": "none", "values": {}},
        "scheduler": extra_state.read_scheduler(_engine(scheduler)),
    }
    return dict(json.loads(json.dumps(saved, allow_nan=False)))


def _deepspeed(name: str) -> Any:
    from deepspeed.runtime import lr_schedules

    return getattr(lr_schedules, name)
