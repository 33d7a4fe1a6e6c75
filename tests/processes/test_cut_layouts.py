"""The record of AutoTP's cuts against its own slices, of layers of every kind."""

from __future__ import annotations

import pytest
from cut_ranks import DTYPES, SIZES
from deepspeed_ranks import verdicts_of


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return verdicts_of("cut_ranks.py", tmp_path_factory.mktemp("cuts"))


@pytest.mark.parametrize("tp", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_ranks_say_of_their_slices_puts_them_together(dtype: str, tp: int, verdicts: dict[str, str]) -> None:
    assert verdicts[f"{dtype}-tp{tp}"] == ""


@pytest.mark.parametrize("what", ["in another order", "as one", "scaled"])
def test_slices_that_are_not_what_autotp_says_are_noticed_by_their_values(what: str, verdicts: dict[str, str]) -> None:
    assert verdicts[what] == ""
