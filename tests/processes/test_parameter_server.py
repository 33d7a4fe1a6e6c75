"""A parameter server and its workers as processes: SIGKILL of a worker and of servers; a problem with known optimum."""

from __future__ import annotations

import pytest
import torch
from convex import DIMENSIONS, objective, optimum
from server_ranks import Problem, processes

from elastic.core.server.global_batches import begin

pytestmark = pytest.mark.processes


def plain(problem: Problem, micros: int, steps: int) -> torch.Tensor:
    """torch alone; gradients are added up in the order of the samples."""
    model, optimizer = problem.model()
    for step in range(steps):
        total = torch.zeros_like(model.weight)
        for number in range(step * micros, (step + 1) * micros):
            optimizer.zero_grad()
            problem.loss(model, number).backward()
            assert model.weight.grad is not None
            total += model.weight.grad
        model.weight.grad = total / micros
        optimizer.step()
    return model.weight.detach()


@pytest.mark.parametrize("staleness", [0, 3])
def test_a_worker_and_a_server_are_killed_and_nothing_acknowledged_is_lost(staleness: int) -> None:
    """Three workers, two servers. Full batches of 4 micro-batches: the optimum is where the objective is least."""
    problem, micros, steps = Problem(lr=0.3, ridge=0.05, micro=240), 4, 150
    with processes() as made:
        made.begin(problem, begin(micros, staleness, steps), {"a": 5, "b": 20, "c": 1})
        made.go_on("a")
        assert made.told("a")[0] == "at"
        made.kill("a")
        made.client.members(["b", "c"])
        made.go_on("b")
        assert made.told("b")[0] == "at"
        made.go_on("c")
        assert made.told("c")[0] == "at"
        # The primary of the rules' state and of half of the parameters.
        made.kill("s0")
        made.replace_server("s0", "s2")
        made.go_on("c")
        # What it was sent is the only copy of a half now.
        made.kill("s1")
        made.replace_server("s1", "s3")
        made.go_on("b")
        weights = [torch.tensor(made.told(name)[1]) for name in ("b", "c")]
        state = made.client.batches()
    assert (state.version, state.next_micro, state.returned, state.leases) == (steps, steps * micros, (), {})
    assert torch.equal(*weights)
    want = plain(problem, micros, steps)
    if staleness == 0:
        assert torch.equal(weights[0], want)
    least, begun = optimum(problem.ridge), objective(torch.zeros(DIMENSIONS), problem.ridge)
    assert objective(weights[0].reshape(-1), problem.ridge) - least < 1e-3 * (begun - least)
