"""elastic watch, story, status and logs over fakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_fakes import FakeBackend, InterruptedHandle
from elastic_jobs import cli
from elastic_jobs.submit.fake_jobs_api import FakeJobsApi

from elastic.observe.journal import JournalWriter


def test_watch_of_a_finished_run_tells_its_end(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cli.main(["run", "job.yaml", "--run-id", "r1"], FakeBackend())
    capfd.readouterr()
    assert cli.main(["watch", "r1", "--json"], FakeBackend()) == 0
    assert json.loads(capfd.readouterr().out)["status"] == "finished"


def test_story_on_stdout_as_text_and_as_json(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    writer = JournalWriter("runs", "r1", clock=lambda: 0.0)
    writer.append({"type": "decision", "sentence": "4 workers ready", "generation": 1, "world_size": 4, "step": 0})
    assert cli.main(["story", "r1"], FakeBackend()) == 0
    assert capfd.readouterr().out.splitlines() == [
        "run r1, begun 1970-01-01 00:00:00 UTC",
        "00:00:00     +0.00 s  [gen 1, world 4, step 0] 4 workers ready",
    ]
    assert cli.main(["story", "r1", "--json"], FakeBackend()) == 0
    assert json.loads(capfd.readouterr().out)["sentence"] == "4 workers ready"


def test_status_and_logs_of_a_run_that_elastic_run_started(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "job.yaml", "--run-id", "r1"], FakeBackend("gave-up")) == 104
    logs = job.parent / "runs" / "r1" / "logs"
    logs.mkdir()
    (logs / "worker-0000.log").write_text("hello\n\x1b[31mred\n")
    (logs / "worker-0012.log").write_text("there\n")
    (logs / "worker-0013.log").symlink_to("/etc/passwd")
    capfd.readouterr()
    assert cli.main(["status", "r1", "--json"], FakeBackend()) == 104
    assert json.loads(capfd.readouterr().out)["status"] == "gave-up"
    assert cli.main(["logs", "r1"], FakeBackend()) == 104
    assert capfd.readouterr().out.splitlines() == ["[worker 0] hello", "[worker 0]  [31mred", "[worker 12] there"]
    assert cli.main(["logs", "r1", "--worker", "12"], FakeBackend()) == 104
    assert capfd.readouterr().out == "[worker 12] there\n"
    (logs / "worker-0012.log").write_text(
        "set-up\n--- generation 1, rank 2 of 3 ---\none\n--- generation 3, rank 0 of 2 ---\ntwo\n"
    )
    for chosen, shown in (
        (["--rank", "2"], ["--- generation 1, rank 2 of 3 ---", "one"]),
        (["--rank", "0", "--generation", "3"], ["--- generation 3, rank 0 of 2 ---", "two"]),
        (["--generation", "2"], []),
    ):
        assert cli.main(["logs", "r1", *chosen], FakeBackend()) == 104
        assert capfd.readouterr().out.splitlines() == [f"[worker 12] {line}" for line in shown]
    assert cli.main(["logs", "r1", "--rank", "2", "--address", "a:1"], FakeBackend()) == 2
    assert "--rank selects from the output of workers" in capfd.readouterr().err
    assert cli.main(["logs", "r1", "-f"], FakeBackend()) == 2
    assert cli.main(["status", "r2"], FakeBackend()) == 102


def test_status_of_a_run_that_goes_on_says_how_to_follow_it(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    backend = FakeBackend()
    backend.handle = InterruptedHandle()
    backend.play = lambda writer: None  # type: ignore[method-assign]
    assert cli.main(["run", "job.yaml", "--run-id", "r1", "--address", "a:1"], backend) == 101
    capfd.readouterr()
    assert cli.main(["status", "r1"], FakeBackend()) == 101
    assert "elastic watch r1" in capfd.readouterr().err


@pytest.mark.parametrize("command", ["stop", "resume"])
def test_the_environments_jobs_server_serves_runs_that_are_not_in_storage(
    job: Path, command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://head:8265")
    asked: list[str] = []

    class WithServer(FakeBackend):
        def jobs_api(self, address: str) -> FakeJobsApi:
            asked.append(address)
            return FakeJobsApi()

    assert cli.main([command, "elsewhere"], WithServer()) == 102
    assert "the cluster knows no run 'elsewhere'" in capfd.readouterr().err
    assert asked == ["http://head:8265"]
    assert cli.main([command, "elsewhere", "--storage", "runs"], WithServer()) == 102
    assert cli.main(["run", "job.yaml", "--run-id", "here"], FakeBackend()) == 0
    assert cli.main([command, "here"], WithServer()) in (0, 102)
    assert len(asked) == 1
