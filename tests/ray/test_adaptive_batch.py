"""A batch that follows the number of workers, on real nodes, two of which are killed in the middle."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from elastic_cluster import LocalCluster
from harness import Run, four_three_two_four, given_samples

from elastic.core.data.adaptive_batch import AdaptiveBatch

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_every_sample_once_while_the_batch_follows_the_nodes(cluster: LocalCluster, tmp_path: Path) -> None:
    config: dict[str, Any] = {"stage": 1, "dtype": "fp32", "optimizer": "adamw", "batch": 8}
    run = Run(cluster, tmp_path, config=config, memory={"every_steps": 1}, anomalies={"policy": "skip"})
    run.settings = replace(run.settings, adaptive_batch=AdaptiveBatch("sqrt", warmup_steps=3))
    four_three_two_four(run)
    run.assert_time_is_accounted_for()
    run.assert_generations_are_told()
    ledger = run.records("samples")[-1]
    assert (ledger["seen"], ledger["missing"], ledger["repeated"]) == (2 * 127, 0, 0)
    given = given_samples(tmp_path)
    final = [indices for step in sorted(given) for indices in given[step][max(given[step])].values()]
    assert Counter(index for indices in final for index in indices) == dict.fromkeys(range(127), 2)
    workers = {told["number"]: told["world_size"] for told in run.summary()["generations"]}
    for step in sorted(given)[:-1]:
        newest = max(given[step])
        counts = {len(indices) for indices in given[step][newest].values()}
        assert counts == {2}, f"step {step}: as many samples for each of {workers[newest]} workers"
    rates = {step["step"]: step["learning_rates"][0] for told in run.records("steps") for step in told["steps"]}
    assert rates[7] > rates[12] == pytest.approx(rates[7] * 0.5**0.5)
