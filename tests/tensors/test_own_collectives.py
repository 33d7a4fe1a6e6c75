"""When a loop's own collectives tell that functions must begin together."""

from __future__ import annotations

from elastic.training.in_loop.own_collectives import APART, UNSURE, OwnCollectives


def _of(*steps: int, before: OwnCollectives | None = None) -> OwnCollectives:
    own = OwnCollectives(before)
    for count in steps:
        own.batch_over(count, last=True)
    return own


def test_two_steps_that_are_alike_are_enough() -> None:
    verdicts = [(own.why, own.unsure, own.sure) for own in (_of(), _of(1), _of(1, 1), _of(0, 0), _of(1, 0))]
    assert verdicts == [("", "", False), ("", UNSURE, False), ("", "", True), ("", "", True), (APART, "", True)]


def test_steps_of_two_generations_are_not_compared() -> None:
    own = _of(1)
    own.goes_on()
    # The first may be the rest of one.
    own.batch_over(2, last=True)
    own.batch_over(3, last=True)
    assert (own.why, own.unsure) == ("", UNSURE)
    own.batch_over(3, last=True)
    assert (own.why, own.unsure) == ("", "")


def test_some_and_none_are_not_the_same_in_two_generations() -> None:
    """Seen: two workers were in the first collective of their loop, alone, and only they began again."""
    own = _of(0, 0)
    own.goes_on()
    own.batch_over(0, last=True)
    assert own.why == ""
    own.broken(1)
    assert own.why == APART
    own = _of(1)
    own.goes_on()
    own.batch_over(0, last=True)
    assert own.why == "", "the rest of a step"
    own.batch_over(0, last=True)
    assert own.why == APART


def test_a_collective_of_a_broken_step_that_no_step_had_before() -> None:
    own = _of(1, 1)
    own.broken(1)
    assert own.why == ""
    own.broken(2)
    assert own.why == APART
    assert OwnCollectives(own).why == APART, "it is the same script when it is called again"


def test_a_loop_that_asks_for_the_runs_step_is_believed() -> None:
    own = _of(1, 0)
    own.by_step = True
    assert (own.why, own.unsure, _of(1, before=own).unsure) == ("", "", "")


def test_collectives_outside_of_the_steps_are_the_scripts_in_every_call() -> None:
    own = _of(1, 1)
    own.outside, own.by_step = "an evaluation", True
    assert (own.why, OwnCollectives(own).why) == ("an evaluation", "an evaluation")
