"""The plan of a run: its JSON forms are exact, and damaged ones are refused by name."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from elastic_cluster.chaos import Chaos
from elastic_jobs.running.run_plan import Job, Output, Place, RunPlan

from elastic.core.errors import IntegrityError, UsageError
from elastic.core.settings import RunSettings, SnapshotSettings

JOB = Job(RunSettings("r", snapshots=SnapshotSettings(required=True)), "a.py:main", {"lr": 0.1}, "/home/x")
PLAN = RunPlan(JOB, Place(None, 3, True, 5, 9.0, Chaos.parse("kill-node@step=4,add-node@step=9")), Output("/s", True))


def test_the_json_form_is_exact() -> None:
    assert RunPlan.from_json(json.loads(json.dumps(PLAN.to_json()))) == PLAN
    assert Job.from_json(json.loads(json.dumps(JOB.record()))) == JOB


@pytest.mark.parametrize(
    "change", [{"settings": None}, {"settings": []}, {"entry_point": 3}, {"config": [1]}, {"folder": ["x"]}]
)
def test_a_damaged_job_record_is_named(change: dict[str, Any]) -> None:
    with pytest.raises(IntegrityError, match=r"job\.json is damaged"):
        Job.from_json({**JOB.record(), **change})


def test_settings_of_a_newer_release_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    record = JOB.record()
    record["settings"]["teleport"] = True
    with pytest.raises(UsageError, match="teleport"):
        Job.from_json(record)
    assert pickle.loads(pickle.dumps(JOB.settings)) == JOB.settings  # noqa: S301
    with monkeypatch.context() as newer:
        newer.setattr(RunSettings, "to_json", lambda self: record["settings"])
        sent = pickle.dumps(JOB.settings)
    with pytest.raises(UsageError, match="teleport"):
        pickle.loads(sent)  # noqa: S301
