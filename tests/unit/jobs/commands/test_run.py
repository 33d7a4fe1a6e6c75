"""elastic run over fakes: what starts when, what is refused first, and what is left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import JOB, FakeBackend, FakeCluster, InterruptedHandle
from elastic_cluster.source import ClusterError
from elastic_jobs import cli
from elastic_jobs.commands import run as run_command
from elastic_jobs.run_folder import RunFolder, new_run_id
from elastic_jobs.running import handover
from elastic_jobs.running.backend import Growth, NodeShape, NotStarted
from elastic_jobs.running.handle import FakeHandle
from elastic_jobs.running.live import Live, read_live

from elastic.core.errors import NobodyAnswers, UserCodeError
from elastic.observe.journal import JournalWriter


def test_a_run_from_start_to_end(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    backend = FakeBackend()
    assert (
        cli.main(["run", "job.yaml", "--run-id", "r1", "--nodes", "3", "--summary", "s.json", "--json"], backend) == 0
    )
    (_, nodes, shape), (_, settings, entry, _, address) = backend.calls
    assert (nodes, shape) == (3, NodeShape(2.0, 1.0, {"TPU": 3.0}))
    assert (settings.run_id, settings.storage_url, address) == ("r1", str(job.parent / "runs"), "127.0.0.1:1")
    assert entry == f"{job.parent}/cli_train.py:main"
    assert backend.cluster.log == ["disconnect", "shutdown"]
    out, err = capfd.readouterr()
    assert json.loads(out) == json.loads((job.parent / "s.json").read_text())
    assert json.loads(out)["final_loss"] == 1.5
    assert "run r1" in err
    assert "\x1b" not in out + err
    assert RunFolder("runs", "r1").read_job().settings == settings
    assert read_live(RunFolder("runs", "r1")) is None


def test_a_cluster_that_grows_begins_with_what_the_run_needs_at_least(
    job: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    backend = FakeBackend()
    assert cli.main(["run", "job.yaml", "--autoscale", "--max-nodes", "7", "--node-every", "9"], backend) == 0
    least = backend.calls[1][1].scaling.min_slots
    assert backend.calls[0] == ("autoscaled", Growth(7, least, 9.0), NodeShape(2.0, 1.0, {"TPU": 3.0}))
    assert "with Ray's autoscaler" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--autoscale", "--address", "a"], "--autoscale starts a local cluster; leave out --address"),
        (["--max-nodes", "3"], "--max-nodes goes with --autoscale"),
        (["--autoscale", "--nodes", "3", "--max-nodes", "2"], "--nodes 3 is above --max-nodes 2"),
    ],
)
def test_what_does_not_go_with_an_autoscaler_is_said_before_anything_starts(
    job: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    backend = FakeBackend()
    assert cli.main(["run", "job.yaml", *arguments], backend) == 2
    assert said in capfd.readouterr().err
    assert backend.calls == []


@pytest.mark.parametrize(
    ("status", "code"),
    [
        ("finished", 0),
        ("usage", 2),
        ("user-code-failed", 100),
        ("not-finished", 101),
        ("stopped", 103),
        ("gave-up", 104),
        ("no-capacity", 105),
        ("integrity", 106),
        ("something new", 101),
    ],
)
def test_exit_codes_follow_the_status(job: Path, status: str, code: int) -> None:
    assert cli.main(["run", "job.yaml"], FakeBackend(status)) == code


def test_user_codes_traceback_is_shown_without_control_characters(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class Failing(FakeBackend):
        def play(self, writer: JournalWriter) -> None:
            error = {"event": "UserCodeFailed", "worker": 1, "step": 7, "traceback": "Traceback\n  \x1b[31mboom"}
            writer.append({"type": "event", **error})
            super().play(writer)

    assert cli.main(["run", "job.yaml"], Failing("user-code-failed")) == 100
    err = capfd.readouterr().err
    assert "worker 1, step 7:\nTraceback\n   [31mboom\n" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["job.yaml", "--nodes", "1"], "1 node can hold 1 worker, but min_workers is 2"),
        (["nope.yaml"], "nope.yaml cannot be read"),
        (["job.yaml", "--run-id", "../x"], "run id '../x'"),
        (["job.yaml", "--summary", "no/such/folder/s.json"], "cannot write a file there"),
        (["job.yaml", "--chaos", "gibberish"], "gibberish"),
        (["job.yaml", "--chaos", "kill-node@step=1", "--address", "a:1"], "--chaos works on a local cluster only"),
        (["job.yaml", "--storage", "nosuch://x"], "nosuch"),
    ],
)
def test_bad_input_ends_before_anything_starts(
    job: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    backend = FakeBackend()
    assert cli.main(["run", *arguments], backend) == 2
    out, err = capfd.readouterr()
    assert said in err
    assert out == ""
    assert backend.calls == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("deepspeed: {elasticity: {enabled: true}}", "deepspeed: DeepSpeed option elasticity"),
        ("deepspeed: {train_batch_size: 3}\nglobal_batch: 4", "global_batch 4"),
        ("checkpoint: {url: 'nosuch://bucket'}", "nosuch"),
    ],
)
def test_a_bad_job_ends_before_anything_starts(
    job: Path, capfd: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    job.write_text(f"{JOB}{line}\n")
    backend = FakeBackend()
    assert cli.main(["run", "job.yaml"], backend) == 2
    assert said in capfd.readouterr().err
    assert backend.calls == []


def test_a_run_id_is_used_once(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "job.yaml", "--run-id", "r1"], FakeBackend()) == 0
    assert cli.main(["run", "job.yaml", "--run-id", "r1"], FakeBackend()) == 2
    assert "elastic resume" in capfd.readouterr().err


def test_a_summary_that_cannot_be_written_changes_nothing_of_the_runs_end(
    job: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Tidy(FakeBackend):
        def play(self, writer: JournalWriter) -> None:
            (job.parent / "out").rmdir()
            super().play(writer)

    (job.parent / "out").mkdir()
    assert cli.main(["run", "job.yaml", "--summary", "out/summary.json"], Tidy()) == 0
    assert "the summary cannot be written" in capfd.readouterr().err


def test_a_cluster_that_is_slow_to_end_changes_nothing_of_the_runs_end(
    job: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    backend = FakeBackend()

    def shutdown() -> None:
        raise ClusterError("waited 30 s for the cluster to end")

    backend.cluster.shutdown = shutdown  # type: ignore[method-assign]
    assert cli.main(["run", "job.yaml"], backend) == 0
    assert "has not ended yet: waited 30 s" in capfd.readouterr().err


@pytest.mark.parametrize("where", [[], ["--address", "a:1"]])
def test_a_run_is_found_from_its_first_instant_on(job: Path, where: list[str]) -> None:
    class Killed(FakeBackend):
        def start_run(self, *_: Any) -> FakeHandle:
            found.append(read_live(RunFolder("runs", "r1")))
            raise KeyboardInterrupt

    found: list[Live | None] = []
    assert cli.main(["run", "job.yaml", "--run-id", "r1", *where], Killed()) == 101
    assert found == [Live("a:1") if where else Live("127.0.0.1:1", "/nowhere/keeper.sock")]


@pytest.mark.parametrize("error", [NotStarted("no memory"), KeyboardInterrupt()])
def test_a_cluster_that_did_not_start_leaves_the_run_id_free(job: Path, error: BaseException) -> None:
    class Broken(FakeBackend):
        def start_cluster(self, *_: Any, **__: Any) -> FakeCluster:
            raise error

    assert cli.main(["run", "job.yaml", "--run-id", "r1"], Broken()) == 101
    assert cli.main(["run", "job.yaml", "--run-id", "r1"], FakeBackend()) == 0


def test_a_run_that_is_refused_by_its_cluster_leaves_nothing_behind(job: Path) -> None:
    class Refusing(FakeBackend):
        def start_run(self, *_: Any) -> FakeHandle:
            raise NobodyAnswers("no Ray cluster answers at 'a:1'")

    assert cli.main(["run", "job.yaml", "--run-id", "r1", "--address", "a:1"], Refusing()) == 2
    assert [path.name for path in (job.parent / "runs").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("where", [[], ["--address", "a:1"]])
def test_of_two_runs_of_one_name_at_one_instant_the_refused_one_takes_nothing_back(
    job: Path, where: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["run", "job.yaml", "--run-id", "r1", *where]
    winner, loser = FakeBackend(), FakeBackend()
    winner.play = lambda writer: None  # type: ignore[method-assign]
    winner.handle = InterruptedHandle()
    monkeypatch.setattr(handover, "hand_over", lambda *_: None)
    prepare = run_command.prepare

    def beaten(options: Any) -> Any:
        plan = prepare(options)
        monkeypatch.setattr(run_command, "prepare", prepare)
        assert cli.main(words, winner) == 101, "the winner is left running"
        return plan

    monkeypatch.setattr(run_command, "prepare", beaten)
    assert cli.main(words, loser) == 2
    assert "there is a run 'r1'" in capfd.readouterr().err
    assert loser.calls == []
    assert RunFolder("runs", "r1").read_job().settings == winner.calls[-1][1]
    assert read_live(RunFolder("runs", "r1")) is not None


def test_the_local_cluster_is_shut_down_when_the_run_cannot_start(job: Path) -> None:
    class Broken(FakeBackend):
        def start_run(self, *_: Any) -> FakeHandle:
            raise UserCodeError("no")

    backend = Broken()
    assert cli.main(["run", "job.yaml"], backend) == 100
    assert backend.cluster.log == ["disconnect", "shutdown"]


def test_storage_comes_from_the_argument_before_the_environment(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_STORAGE", str(job.parent / "env"))
    backend = FakeBackend()
    assert cli.main(["run", "job.yaml", "--run-id", "r1"], backend) == 0
    assert backend.calls[1][1].storage_url == str(job.parent / "env")
    assert cli.main(["story", "r1", "--storage", "elsewhere"], FakeBackend()) == 102
    assert cli.main(["story", "r1"], FakeBackend()) == 0


def test_new_run_ids_are_valid_whatever_the_name() -> None:
    assert new_run_id("my run: ../x", 0.0).startswith("my-run-x-19700101-000000-")
    assert new_run_id("???", 0.0).startswith("run-1970")


@pytest.mark.parametrize("where", ["storage_url: memory://x", "checkpoint: {url: 'memory://x'}"])
def test_the_memory_of_one_process_is_no_storage(job: Path, where: str, capfd: pytest.CaptureFixture[str]) -> None:
    job.write_text(f"{JOB}{where}\n")
    assert cli.main(["run", "job.yaml"], FakeBackend()) == 2
    assert "storage 'memory://x' is the memory of one process" in capfd.readouterr().err
