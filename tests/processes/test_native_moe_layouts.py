"""Places of native experts against DeepSpeed's own at world sizes that no test machine has."""

from __future__ import annotations

import pytest
from deepspeed_ranks import verdicts_of
from expert_parallel_ranks import WORLDS
from native_moe_ranks import ZERO


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return verdicts_of("native_moe_ranks.py", tmp_path_factory.mktemp("experts"))


@pytest.mark.parametrize(("world_size", "ep"), list(WORLDS))
@pytest.mark.parametrize("zero", list(ZERO))
def test_a_ranks_experts_have_their_numbers_among_all(
    zero: str, world_size: int, ep: int, verdicts: dict[str, str]
) -> None:
    for rank in WORLDS[world_size, ep]:
        assert verdicts[f"{zero}-{rank}-of-{world_size}-ep{ep}"] == ""
