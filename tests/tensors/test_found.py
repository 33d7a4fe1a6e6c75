"""What a training function holds of its own."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Subset

from elastic.training.user import found

A_GLOBAL = np.random.default_rng(0)


class Data:
    def __init__(self) -> None:
        self.rng = np.random.default_rng(1)

    def __len__(self) -> int:
        return 4


class Trainer:
    """The shape of many: everything hangs on one object."""

    def __init__(self) -> None:
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.teacher = nn.Linear(2, 2)
        self.loss = nn.MSELoss()

    @property
    def broken(self) -> None:
        raise ValueError("properties are not run")

    def look(self, dataset: Any) -> dict[str, Any]:
        return found.visible(dataset)


def test_schedulers_on_our_groups_are_found_under_the_users_names() -> None:
    trainer = Trainer()
    other = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), 2)
    mine = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, 0.9)
    listed = [torch.optim.lr_scheduler.ConstantLR(trainer.optimizer)]
    objects = trainer.look(Data())
    groups = {id(group) for group in trainer.optimizer.param_groups}
    assert other is objects["other"]
    names = found.schedulers(objects, groups, set())
    assert names == {"self.scheduler": trainer.scheduler, "mine": mine, "listed[0]": listed[0]}
    assert list(found.schedulers(objects, groups, {id(mine)})) == ["self.scheduler", "listed[0]"]


def test_generators_and_other_state_are_named() -> None:
    trainer, local = Trainer(), torch.Generator()
    assert local.initial_seed()
    objects = trainer.look(Subset(Data(), [0, 1]))
    known = {id(trainer.model), id(trainer.optimizer), id(trainer.scheduler)}
    names = found.not_kept(objects, known)
    # At least: here the frames below are the test runner's.
    assert (
        names.items()
        >= {
            "dataset.dataset.rng": "Generator",
            "A_GLOBAL": "Generator",
            "local": "Generator",
            "self.teacher": "Linear",
        }.items()
    )
    assert not {"self.model", "self.optimizer", "self.scheduler", "self.loss", "trainer"} & set(names)


def test_looking_keeps_nothing_alive() -> None:
    def function() -> weakref.ReferenceType[Any]:
        model = nn.Linear(2, 2)
        gone = weakref.ref(model)
        found.visible(None)
        del model
        gc.collect()
        return gone

    assert function()() is None


class Hostile:
    """As lazily loaded objects and proxies are: nothing of it can be read."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


class Unreadable(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        raise RuntimeError(str(index))


def test_variables_that_cannot_be_looked_into_are_passed_over() -> None:
    engine, lazy, values = Hostile(), [Hostile()], Unreadable([1])
    bound, partial, generator = engine, [].append, random.Random(0)
    method = found.__spec__.__repr__
    objects = found.visible(Hostile())
    assert objects["generator"] is generator
    assert objects["method"] == method
    assert (engine, lazy, values, bound, partial) is not None
