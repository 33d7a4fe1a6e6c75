"""The layouts of lanes against DeepSpeed's own at world sizes that no test machine has."""

from __future__ import annotations

import pytest
from deepspeed_ranks import verdicts_of
from tensor_parallel_ranks import WORLDS, ZERO


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return verdicts_of("tensor_parallel_ranks.py", tmp_path_factory.mktemp("lanes"))


@pytest.mark.parametrize(("world_size", "tp"), list(WORLDS))
@pytest.mark.parametrize("zero", list(ZERO))
def test_a_lane_is_partitioned_as_a_world_of_its_own(
    zero: str, world_size: int, tp: int, verdicts: dict[str, str]
) -> None:
    for rank in WORLDS[world_size, tp]:
        assert verdicts[f"{zero}-{rank}-of-{world_size}-tp{tp}"] == ""
