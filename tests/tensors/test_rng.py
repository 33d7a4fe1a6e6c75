"""Random streams are named by their place in the run."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import torch

from elastic.training.rng import derive, forward_stream, seed_everything


def _draw() -> tuple[float, float, float]:
    return float(torch.rand(())), float(np.random.rand()), random.random()


def test_equal_places_draw_equal_numbers() -> None:
    seed_everything(1, "forward", 5, 2)
    first = _draw()
    seed_everything(1, "forward", 5, 3)
    other = _draw()
    seed_everything(1, "forward", 5, 2)
    assert _draw() == first
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_no_two_names_share_a_stream() -> None:
    names = [(seed, tag, step, index) for seed in range(3) for tag in "ab" for step in range(40) for index in range(9)]
    # Concatenated they would be alike.
    names += [(1, "a", 1, 11), (1, "a", 11, 1), (11, "a", 1, 1), ("1", "a", 1, 1)]
    assert len({derive(*name) for name in names}) == len(set(names))


def test_a_forward_passes_stream_depends_on_each_part_of_its_place() -> None:
    places = [(seed, step, batch, n) for seed in range(2) for step in range(30) for batch in range(6) for n in range(2)]
    assert len({derive(*forward_stream(*place)) for place in places}) == len(places)


def test_seeds_are_the_same_in_every_process() -> None:
    # A hash salted per process would give every rank another stream.
    code = "from elastic.training.rng import derive; print(derive(7, 'forward', 1, 0))"
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "12345"}
    )
    assert int(told.stdout) == derive(7, "forward", 1, 0)


def test_seeds_fit_everywhere() -> None:
    assert all(0 <= derive(number) < 2**63 for number in range(1000))
