"""No false abort. The number of reshards is small here; `python -m verification` does a thousand."""

from __future__ import annotations

import os

import pytest

from verification.healthy import reshards

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore")]

# Each of these is ten reshards of another random configuration.
SETUPS = int(os.environ.get("PROOF_SETUPS", "12"))


@pytest.mark.parametrize("seed", range(SETUPS))
def test_healthy_reshards_are_not_refused(seed: int) -> None:
    assert reshards(seed) == []
