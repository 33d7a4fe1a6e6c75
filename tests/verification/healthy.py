"""Reshards of healthy states over random configurations: none may be refused, and each must give back every value."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch

from verification import scene
from verification.compare import differences, plain
from verification.model import DTYPES, KINDS, Buffer, Parameter, Setup

_WORLDS = (1, 2, 3, 4, 5, 6, 7, 12)
# Less than a rank's part, primes, and a few that can be cut evenly.
_SHAPES = ((1,), (1, 1), (2,), (3,), (7,), (13,), (97,), (8, 8), (7, 7), (64,), (11, 3))
# Configurations are changed this often, so that most of the time goes into reshards.
PER_SETUP = 10


def random_setup(seed: int) -> Setup:
    """Anything that a user may have: stage, precision, optimizer, groups, shapes, options."""
    dice = random.Random(seed)
    stage = dice.choice((0, 1, 2, 3))
    groups = dice.choice((1, 3))
    zero: dict[str, Any] = {}
    if stage == 3:
        zero = {
            "sub_group_size": dice.choice((1, 20, 60, 1_000_000)),
            "stage3_param_persistence_threshold": dice.choice((0, 10, 100_000)),
        }
    elif stage in (1, 2):
        zero = {"round_robin_gradients": dice.random() < 0.3, "parameter_alignment": dice.random() < 0.3}
    return Setup(
        stage,
        dice.choice(tuple(DTYPES)),
        dice.choice(tuple(KINDS)),
        zero=zero,
        parameters=tuple(_parameters(dice, groups)),
        buffers=tuple(_buffers(dice)),
    )


def _parameters(dice: random.Random, groups: int) -> Iterator[Parameter]:
    # Every group has one at least.
    members = list(range(groups)) + [dice.choice((*range(groups), None)) for _ in range(dice.randrange(1, 14))]
    for number, group in enumerate(members):
        name = f"layers.{number}.weight"
        ties = (f"tied.{number}",) if dice.random() < 0.15 else ()
        yield Parameter(name, dice.choice(_SHAPES), group, ties, idle=group is not None and dice.random() < 0.1)


def _buffers(dice: random.Random) -> Iterator[Buffer]:
    for number in range(dice.randrange(4)):
        shape = dice.choice(((), (1,), (7,), (3, 5)))
        dtype = dice.choice((torch.float32, torch.int64, torch.bool))
        yield Buffer(f"drift.buffer{number}", shape, dtype, persistent=dice.random() < 0.7)


def reshards(seed: int, count: int = PER_SETUP) -> list[str]:
    """`count` reshards of one random setup through three world sizes, each from what the last one restored.

    What went wrong: an abort, or a value that differs.
    """
    dice = random.Random(seed)
    setup = random_setup(seed)
    sizes = dice.sample(_WORLDS, 3)
    with ExitStack() as stack:
        worlds = [stack.enter_context(scene.world(setup, size, scene.SAVED)) for size in sizes]
        at, wanted = 0, plain(worlds[0])
        for _ in range(count):
            target = dice.randrange(3)
            wrong = _reshard(worlds[at], worlds[target], wanted)
            if wrong:
                return [f"seed {seed}, {setup}, {sizes[at]} -> {sizes[target]}: {what}" for what in wrong]
            at = target
    return []


def _reshard(source: scene.World, target: scene.World, wanted: dict[str, Any]) -> list[str]:
    store, checkpoint = scene.save(source)
    scene.require(target.run(lambda engine, _: _spoil(engine)))
    places = scene.restore(target, lambda rank: store, checkpoint)
    errors = [f"aborted: {result}" for result in places if isinstance(result, Exception)]
    return errors or differences(target, scene.SAVED, wanted, places)


@torch.no_grad()
def _spoil(engine: Any) -> None:
    """Nothing of what the engine held may help the restore."""
    from elastic.engines.inventory import Inventory

    stage = scene.stage_of(engine)
    for tensor in Inventory.of(stage).tensors().values():
        tensor.detach().zero_()
    for weight in stage.weights():
        weight.tensor.zero_()
    for group in stage.base.param_groups:
        group["lr"], group["weight_decay"] = 123.0, 0.5
    engine.global_steps = engine.skipped_steps = 99
    engine.lr_scheduler.last_epoch = 77
