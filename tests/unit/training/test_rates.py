from __future__ import annotations

import pytest

from elastic.training.user.rates import Rates


def test_a_repeated_step_with_another_rate_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    rates = Rates()
    for step, rate in ((1, 0.1), (2, 0.2), (2, 0.2), (3, 0.3), (2, 0.25), (3, 0.35)):
        rates.check(step, [rate])
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "step 2 is repeated with learning rate 0.25"
    ]
