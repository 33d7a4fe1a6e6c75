"""What a rank may keep of a step that its engine has not finished, and what it may bring into the next. One process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic.core.data.step_plan import StepPlan
from elastic.core.data.unfinished import Rest
from elastic.core.generation_spec import GenerationSpec
from elastic.training.in_loop.step_share import StepShare, Unfinished
from elastic.training.in_loop.unfinished import continued, fingerprint, refused

STEP, RANKS = 7, 4
PLAN = StepPlan(16, 1, RANKS, 1, 100, 160, 4)
MINE = PLAN.deal(STEP)


class Sums:
    """One sum, to which each micro-batch adds its index."""

    def __init__(self) -> None:
        self.value: torch.Tensor | None = None

    def before_reduction(self, call: Any) -> None:
        self.reduce = call

    def take(self) -> dict[str, torch.Tensor]:
        value, self.value = self.value, None
        return {} if value is None else {"weight": value}

    def add(self, sums: dict[str, torch.Tensor]) -> None:
        value = sums["weight"]
        self.value = value if self.value is None else self.value + value


def share(sums: Any, world_size: int = RANKS, why: str | None = None, carried: Unfinished | None = None) -> StepShare:
    engine: Any = SimpleNamespace(sums=sums, module=torch.nn.Linear(2, 2))
    scope: Any = SimpleNamespace(step=STEP, spec=SimpleNamespace(world_size=world_size))
    return StepShare(engine, scope, why, carried)


def compute(made: StepShare, sums: Sums, number: int, loss: float, last: bool = False) -> None:
    made.adding(STEP, MINE[number], loss, 10 * (number + 1))
    sums.add({"weight": torch.tensor([float(MINE[number].index)])})
    if not last:
        made.added()


def test_whole_micro_batches_are_taken_with_their_losses_and_tokens() -> None:
    sums = Sums()
    made = share(sums)
    compute(made, sums, 0, 0.5)
    compute(made, sums, 1, 0.75)
    taken = made.take(RANKS)
    assert taken is not None
    assert (taken.step, taken.batches, taken.loss, taken.tokens, taken.why) == (STEP, MINE[:2], 0.75, 20, "")
    assert taken.sums["weight"].item() == 4 + 5
    assert sums.value is None, "the engine has them no more"


def test_a_part_of_a_micro_batch_taints_the_sum() -> None:
    sums = Sums()
    made = share(sums)
    compute(made, sums, 0, 0.5)
    compute(made, sums, 1, 0.75, last=True)
    taken = made.take(RANKS)
    assert taken is not None
    assert (taken.why, taken.sums) == ("its backward pass was under way", {})


def test_nothing_is_taken_of_a_step_that_is_finished_or_not_begun() -> None:
    sums = Sums()
    assert share(sums).take(RANKS) is None
    made = share(sums)
    made.adding(STEP - 1, MINE[0], 0.5, 10)
    made.added()
    assert made.take(RANKS) is None
    single = share(sums, why="")
    compute(single, sums, 0, 0.5)
    assert single.take(RANKS) is None, "no pass could be saved"


def test_what_is_refused_is_told_before_what_happened() -> None:
    made = share("in stage 3 partial sums lie on other ranks")
    made.adding(STEP, MINE[0], 0.5, 10)
    made.added()
    made.adding(STEP, MINE[1], 0.75, 20)
    taken = made.take(RANKS, "a step that is measured")
    assert taken is not None
    assert taken.why == "in stage 3 partial sums lie on other ranks"


@pytest.mark.parametrize("added", [False, True])
def test_what_was_carried_is_taken_again(added: bool) -> None:
    """Scaled to the ranks once, and only where it was added."""
    module = torch.nn.Linear(2, 2)
    carried = Unfinished(STEP, RANKS, MINE[:2], 0.75, 20, module, {"weight": torch.tensor([8.0])})
    sums = Sums()
    made = share(sums, 3, carried=carried)
    assert made.loss == 0.75
    if added:
        compute(made, sums, 2, 1.0)
    taken = made.take(3)
    assert taken is not None
    assert taken.batches == MINE[: 3 if added else 2]
    assert (taken.loss, taken.tokens) == ((1.0, 30) if added else (0.75, 20))
    assert (taken.sums["weight"].item(), taken.ranks) == ((8.0 * 3 / 4 + 6, 3) if added else (8.0, 4))


def held(module: torch.nn.Module, **changes: Any) -> Unfinished:
    made = Unfinished(STEP, RANKS, MINE, 1.0, 40, module, {"weight": torch.ones(1)}, weights=fingerprint(module))
    for name, value in changes.items():
        setattr(made, name, value)
    return made


RESTORED = {"elastic.state['seen']": 3, "elastic.state['of rank 0']": 4}


def goes_on(mine: Unfinished | None, module: torch.nn.Module, plan: StepPlan = PLAN) -> tuple[Any, str]:
    """With a rank that holds micro-batches 8 to 15."""
    ranks: Any = SimpleNamespace(sums=lambda offers: [held + (at >= 8) for at, held in enumerate(offers)])
    plan, carried, why = continued(mine, plan, STEP, module, RESTORED, ranks)
    assert carried is (None if why else mine)
    return plan.rest, why


def test_what_nobody_holds_is_dealt_again() -> None:
    module = torch.nn.Linear(2, 2)
    assert goes_on(held(module), module) == (Rest(STEP, (0, 1, 2, 3)), "")
    assert goes_on(None, module) == (Rest(STEP, tuple(range(8))), "")
    alone = StepPlan(16, 1, 1, 0, 100, 160, 16)
    assert refused(alone, GenerationSpec("run", 1, 0, 1)) is None
    assert goes_on(held(module), module, alone) == (Rest(STEP, (0, 1, 2, 3)), "")


def test_sums_of_another_state_are_not_brought_in() -> None:
    module = torch.nn.Linear(2, 2)
    module.register_buffer("seen", torch.zeros(3))
    before = held(module)
    eight = Rest(STEP, tuple(range(8)))
    assert goes_on(held(module, why="a reason"), module) == (eight, "a reason")
    rest, why = goes_on(held(module, step=STEP + 1), module)
    assert (rest, "the state after step 7 was restored" in why) == (eight, True)
    other = StepPlan(16, 1, RANKS, 1, 100, 160, 4, skips=((0, 16),))
    assert goes_on(held(module), module, other) == (eight, "the samples of the step are others")
    for tensor, name in ((module.bias, "bias"), (module.seen, "seen")):
        with torch.no_grad():
            tensor[0] += 1e-6
        rest, why = goes_on(before, module)
        assert (rest, why.startswith(f"{name!r} is not what it was")) == (eight, True), why
        with torch.no_grad():
            tensor[0] -= 1e-6
        before = held(module)


def test_sums_beside_which_the_loop_has_kept_something_are_not_brought_in() -> None:
    """Seen: of a hidden state that a loop keeps for each column of a text, what kept micro-batches had added was lost:
    the losses of all later steps were others, without a word."""
    module = torch.nn.Linear(2, 2)
    assert goes_on(held(module, user={"elastic.state['seen']": 3}), module)[1] == ""
    rest, why = goes_on(held(module, user={"elastic.state['seen']": 5}), module)
    assert rest == Rest(STEP, tuple(range(8)))
    assert why.startswith("elastic.state['seen'] is not what was restored")


def test_what_can_never_be_continued_is_known_by_all_ranks() -> None:
    spec = GenerationSpec("run", 1, 0, 4)
    assert refused(PLAN, spec) is None
    assert refused(StepPlan(16, 4, RANKS, 1, 100, 160, 1), spec) == ""
    assert refused(StepPlan(16, 1, RANKS, 1, None, 160, 4, stream=(("files", "7"),)), spec) is not None
    assert refused(PLAN, GenerationSpec("run", 1, 0, 4, sp=2)) is not None
    assert refused(PLAN, GenerationSpec("run", 1, 0, 4, audit_every_steps=5)) is not None
