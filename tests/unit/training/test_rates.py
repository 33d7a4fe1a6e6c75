from __future__ import annotations

import pytest

from elastic.training.user.rates import Rates


def test_a_repeated_step_with_another_rate_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    rates = Rates()
    for step, rate in ((1, 0.1), (2, 0.2), (2, 0.2), (3, 0.3), (2, 0.25), (3, 0.35)):
        rates.before_update(step, (rate,), ())
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "step 2 is repeated with learning rate 0.25"
    ]


@pytest.mark.parametrize(
    ("restored", "now", "said"),
    [
        (0.3, 0.1, True),
        (0.3, 0.3, False),  # the restored rate, of a scheduler or a constant
        (0.1, 0.1, False),  # the same rate all the time
        (0.3, 0.4, False),  # by the run's step
        (None, 0.1, False),  # a new run
    ],
)
def test_the_rate_of_the_runs_first_step_after_a_restore_is_named(
    restored: float | None, now: float, said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    rates = Rates()
    rates.restored(None if restored is None else (restored,))
    for step in (7, 8):
        rates.before_update(step, (now,), (0.1,))
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == (
        ["step 7 has learning rate 0.1"] if said else []
    )
