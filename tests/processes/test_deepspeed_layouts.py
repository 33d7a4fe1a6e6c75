"""Our layouts against DeepSpeed's own at world sizes that no test machine has."""

from __future__ import annotations

import pytest
from deepspeed_ranks import WORLDS, ZERO, verdicts_of


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return verdicts_of("deepspeed_ranks.py", tmp_path_factory.mktemp("layouts"))


@pytest.mark.parametrize("world_size", list(WORLDS))
@pytest.mark.parametrize("zero", list(ZERO))
def test_layout_is_that_of_deepspeed(zero: str, world_size: int, verdicts: dict[str, str]) -> None:
    for rank in WORLDS[world_size]:
        assert verdicts[f"{zero}-{rank}-of-{world_size}"] == ""


def test_the_private_fake_process_group_is_still_there(verdicts: dict[str, str]) -> None:
    """A canary: when a new torch moves or changes it, this says so."""
    assert verdicts["canary"] == ""
