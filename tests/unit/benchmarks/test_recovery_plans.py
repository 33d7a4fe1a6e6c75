"""Which plans of the case `recovery` run, and what they are called."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.cases.recovery import FORMS, plans
from benchmarks.options import Options


def names(plan: str, quick: bool = False) -> list[str]:
    return [found.name for found in plans(Options(Path(), quick, plan=plan))]


def test_one_plan_runs_next_to_the_one_that_it_is_compared_with() -> None:
    zero = "node SIGKILL -> next step, 4 -> 3, ZeRO-1, from memory"
    for quick in (False, True):
        for asked, named in (("sp 2", "4 -> 2, sp 2 x ZeRO-1"), (", FSDP2,", "4 -> 3, FSDP2")):
            at_the_end = f"node SIGKILL -> next step, {named}, from memory"
            assert names(asked, quick) == [zero, at_the_end, f"{at_the_end}, at any moment of a step"]
    assert names("", quick=True) == [zero]
    with pytest.raises(ValueError, match=r"no plan has 'cp 2' in its name; there are .*pp 2 x ZeRO-1, from memory"):
        names("cp 2")


def test_each_plan_is_a_run_and_a_figure_of_its_own() -> None:
    every = plans(Options(Path()))
    assert len({plan.run_id for plan in every}) == len({plan.name for plan in every}) == len(every)
    assert {plan.form.name for plan in every if plan.form.name} == {form.name for form in FORMS}


def test_a_plan_of_another_case_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--case", "save", "--plan", "sp 2"])
    assert "--plan is one of the case recovery" in capsys.readouterr().err
