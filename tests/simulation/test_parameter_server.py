"""The rules of the parameter server in a thousand simulated runs with faults. A failure names its seed."""

from __future__ import annotations

import pytest

from simulation.parameter_server import World

SOMETIMES = {
    "server killed", "server cut off", "worker killed", "worker cut off", "join", "state sent", "an answer lost",
    "answer of a replica lost", "a server came back", "both copies of a shard were lost", "a gradient was too old",
    "an old worker was refused", "a request was made again", "a gradient was stale",
}  # fmt: skip


def play(seed: int) -> World:
    world = World(seed)
    try:
        world.run()
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error!r}") from error
    return world


@pytest.mark.parametrize("seeds", [range(1_000), pytest.param(range(1_000, 6_000), marks=pytest.mark.slow)], ids=str)
def test_no_update_is_lost_and_no_gradient_too_old_or_counted_twice(seeds: range) -> None:
    seen: set[str] = set()
    for seed in seeds:
        seen |= play(seed).sometimes
    assert seen >= SOMETIMES, f"never reached in {len(seeds)} runs: {sorted(SOMETIMES - seen)}"
