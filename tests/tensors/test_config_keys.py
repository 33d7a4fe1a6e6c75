"""The table of DeepSpeed's configuration keys is what the installed DeepSpeed says."""

from __future__ import annotations

import json
from importlib import resources

from deepspeed_config_keys import deepspeed_keys


def test_the_table_of_keys_is_that_of_the_installed_deepspeed() -> None:
    table = json.loads(resources.files("elastic.engines.deepspeed").joinpath("config_keys.json").read_text())
    read = deepspeed_keys()
    # The sections that DeepSpeed parses in its different ways were all reached.
    assert read["zero_optimization"]["offload_optimizer"]["ratio"] is None
    assert "cpu_checkpointing" in read["activation_checkpointing"]
    assert read["checkpoint"]["parallel_write"] == {"pipeline_stage": None}
    assert read["timers"]["throughput"] == {"enabled": None, "synchronized": None}
    assert table == read, "write the table anew: see tests/tensors/deepspeed_config_keys.py"
