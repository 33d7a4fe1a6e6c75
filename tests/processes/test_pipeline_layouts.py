"""Stages and their partitions against DeepSpeed's own at world sizes that no test machine has."""

from __future__ import annotations

import pytest
from deepspeed_ranks import verdicts_of
from pipeline_ranks import METHODS, WORLDS


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return verdicts_of("pipeline_ranks.py", tmp_path_factory.mktemp("stages"))


@pytest.mark.parametrize(("world_size", "pp"), list(WORLDS))
@pytest.mark.parametrize("method", list(METHODS))
def test_a_rank_has_whole_layers_under_their_global_names(
    method: str, world_size: int, pp: int, verdicts: dict[str, str]
) -> None:
    for rank in WORLDS[world_size, pp]:
        assert verdicts[f"{method}-{rank}-of-{world_size}-pp{pp}"] == ""
