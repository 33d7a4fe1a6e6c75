"""The Python example of docs/planner.md runs, and its fit explains the steps that it is given."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

_DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "planner.md"


def test_constants_fitted_on_a_few_own_steps_explain_them_and_rank() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", _DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    cost = names["CostModel"](names["cluster"], names["constants"])
    for work, seconds in names["measured"]:
        assert cost.step(work).total_s == pytest.approx(seconds, rel=0.05)
    before = names["CostModel"](names["cluster"])
    assert abs(before.step(names["measured"][0][0]).total_s / 9.6 - 1) > 0.1
    assert names["best"].refusal == ""
    assert names["best"].time.total_s <= 9.6
