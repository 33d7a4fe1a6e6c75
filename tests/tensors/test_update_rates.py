"""What an update is made with, and what the optimizer shows of it."""

from __future__ import annotations

import warnings

import pytest
import torch

from elastic.engines.model.update_rates import scaled_rates, updating


def _made() -> tuple[torch.nn.Parameter, torch.optim.SGD, torch.optim.lr_scheduler.LRScheduler]:
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    optimizer = torch.optim.SGD([parameter], lr=0.25)
    return parameter, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def test_rates_are_scaled_around_the_update_alone() -> None:
    parameter, optimizer, _ = _made()
    with scaled_rates(optimizer.param_groups, 2.0):
        optimizer.step()
    assert (float(parameter.detach()), optimizer.param_groups[0]["lr"]) == (0.5, 0.25)
    with pytest.raises(RuntimeError, match="no"), scaled_rates(optimizer.param_groups, 2.0):
        raise RuntimeError("no")
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_another_update_stands_in_for_a_while_and_schedulers_do_not_mind() -> None:
    parameter, optimizer, scheduler = _made()
    own = optimizer.step
    with updating(optimizer, lambda: None), warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        scheduler.step()
    assert (float(parameter.detach()), optimizer.param_groups[0]["lr"]) == (1.0, 0.125)
    assert optimizer.step == own, "what torch's scheduler has put there"
    optimizer.step()
    assert float(parameter.detach()) == 0.875
