"""The driver of an attempt: attach, start or refuse; SIGTERM; what it says last, and its exit code."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from elastic_jobs import cli
from elastic_jobs.exit_codes import DRIVER_BLIND, DRIVER_LOST
from elastic_jobs.run_folder import RunFolder
from elastic_jobs.running.handle import FakeHandle
from elastic_jobs.running.run_plan import Job
from elastic_jobs.submit import attempts, driver, driver_protocol
from elastic_jobs.submit.driver_command import DriverCommand, Mode

from elastic.core.errors import ElasticError, NobodyAnswers, RunNotFound, StorageError, UsageError
from elastic.core.settings import RunSettings
from elastic.observe.journal import JournalReader, JournalWriter

JOB = "entry_point: driven.py:main\nmax_workers: 2\nmax_steps: 10\nstorage_url: /not/used\n"


class Backend:
    """`alive` is a run that is in progress; `on_start` plays a run that is started."""

    def __init__(self, alive: FakeHandle | None = None) -> None:
        self.alive = alive
        self.started: list[RunSettings] = []
        self.name_is_taken = False
        self.supervised: list[tuple[str, int, int]] = []
        self.looks = 0

    def supervisor(self, run_id: str, attempt: int) -> Backend:
        """Remembers how many runs had been started by then."""
        self.supervised.append((run_id, attempt, len(self.started)))
        return self

    def ensure(self) -> None:
        self.looks += 1

    def attach_run(self, run_id: str, address: str) -> FakeHandle:
        if self.alive is None:
            raise RunNotFound("no such run")
        return self.alive

    def start_run(self, job: Job, address: str) -> FakeHandle:
        settings = job.settings
        if self.name_is_taken:
            self.alive = self.ended("finished")
            raise UsageError("the run is already running")
        self.started.append(settings)
        journal(settings.storage_url, "finished")
        return self.ended("finished")

    @staticmethod
    def ended(status: str) -> FakeHandle:
        handle = FakeHandle("r")
        handle.advance(step=10)
        handle.end(status, "so it is")
        return handle


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "driven.py").write_text("def main(config): ...\n")
    (folder / "job.yaml").write_text(JOB)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(driver, "_REFRESH_S", 0.01)
    return folder


@pytest.fixture(autouse=True)
def _same_signals() -> Any:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def storage(package: Path) -> str:
    return str(package.parent / "runs")


def journal(url: str, *statuses: str) -> None:
    writer = JournalWriter(url, "r")
    for status in statuses:
        writer.append({"type": "run", "run_id": "r", "status": status, "step": 7})


def drive(package: Path, backend: Backend, mode: Mode = "continue", **more: Any) -> int:
    version = more.pop("version", metadata.version("ray-elastic"))
    command = DriverCommand("job.yaml", "r", more.pop("attempt", 1), mode, storage(package), version, **more)
    return driver.main(command.line().split()[4:], backend)  # type: ignore[arg-type]


def last_words(capfd: pytest.CaptureFixture[str]) -> Mapping[str, Any]:
    told = [driver_protocol.parse(line) for line in capfd.readouterr().out.splitlines()]
    return next(words for words in reversed(told) if words is not None)


def test_a_run_is_started(package: Path, capfd: pytest.CaptureFixture[str]) -> None:
    backend = Backend()
    assert drive(package, backend, "new", max_steps=20) == 0
    (settings,) = backend.started
    assert (settings.run_id, settings.storage_url, settings.max_steps) == ("r", storage(package), 20)
    assert RunFolder(storage(package), "r").read_job().settings == settings
    words = last_words(capfd)
    assert (words["status"], words["exit_code"], words["step"]) == ("finished", 0, 10)


def submitted(monkeypatch: pytest.MonkeyPatch, run_id: str = "r", attempt: int = 1) -> None:
    """This process is a job, as Ray's supervisor tells one."""
    about = {"job_submission_id": "x", **attempts.metadata(run_id, attempt, "/runs", "0.1.0")}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"runtime_env": {}, "metadata": about}))


def test_a_submitted_run_is_supervised_before_it_is_started(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted(monkeypatch)
    backend = Backend()
    assert drive(package, backend, "new") == 0
    assert backend.supervised == [("r", 1, 0)]
    assert backend.looks > 1
    # A run that its job file does not allow is not, nor one that has ended.
    backend = Backend()
    assert drive(package, backend, "new") == 2
    assert drive(package, backend, "continue") == 0
    assert (backend.supervised, backend.started) == ([], [])


def test_a_driver_that_attaches_sees_to_it_that_its_run_is_supervised(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(monkeypatch, attempt=4)
    backend = Backend(Backend.ended("finished"))
    assert drive(package, backend, attempt=4) == 0
    assert backend.supervised == [("r", 4, 0)]


@pytest.mark.parametrize("job", [None, "no json", "{}", {"run_id": "other"}, {"attempt": 2}])
def test_who_is_no_job_of_this_run_is_not_supervised(
    package: Path, monkeypatch: pytest.MonkeyPatch, job: str | dict[str, Any] | None
) -> None:
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    if isinstance(job, str):
        monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", job)
    elif job is not None:
        submitted(monkeypatch, **job)
    backend = Backend()
    assert drive(package, backend, "new") == 0
    assert backend.supervised == []


@pytest.mark.parametrize("mode", ["new", "continue", "resume"])
def test_a_run_that_goes_on_is_attached_to(package: Path, mode: Mode, capfd: pytest.CaptureFixture[str]) -> None:
    alive = FakeHandle("r")

    def progress() -> Mapping[str, Any]:
        alive.end("gave-up", "enough")
        return {"status": "running"}

    alive.progress = progress  # type: ignore[method-assign]
    backend = Backend(alive)
    assert drive(package, backend, mode) == 104
    assert backend.started == []
    assert last_words(capfd)["exit_code"] == 104


def test_of_two_that_start_at_once_one_attaches(package: Path) -> None:
    backend = Backend()
    backend.name_is_taken = True
    assert drive(package, backend, "new") == 0
    assert backend.started == []


def test_a_run_that_another_driver_started_and_that_is_out_of_reach_is_no_end(
    package: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Other(Backend):
        def attach_run(self, run_id: str, address: str) -> FakeHandle:
            if self.alive is not None:
                raise ElasticError("the control store is away")
            raise RunNotFound("no such run")

    backend = Other()
    backend.name_is_taken = True
    assert drive(package, backend, "new") == DRIVER_LOST
    assert "elastic-driver" not in capfd.readouterr().out


def test_storage_that_fails_before_the_start_leaves_no_run_behind(
    package: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(folder: RunFolder, live: object) -> None:
        raise StorageError("the store is away")

    monkeypatch.setattr(driver, "write_live", fail)
    backend = Backend()
    assert drive(package, backend, "new") == 101
    assert last_words(capfd)["reason"] == "the store is away"
    assert backend.started == []


@pytest.mark.parametrize(
    ("mode", "attempt", "code"),
    [
        # The run may have reached its end: what its driver cannot read is not for it to guess.
        ("continue", 2, DRIVER_BLIND),
        ("stop", 2, DRIVER_BLIND),
        # Nothing was begun, and somebody waits for the answer.
        ("new", 1, 101),
        ("continue", 1, 101),
        ("resume", 2, 101),
    ],
)
def test_storage_that_fails_where_no_controller_lives(
    package: Path, mode: Mode, attempt: int, code: int, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def fail(*_: object) -> None:
        raise StorageError("the store is away")

    monkeypatch.setattr(JournalReader, "records", fail)
    monkeypatch.setattr(RunFolder, "read", fail)
    backend = Backend()
    assert drive(package, backend, mode, attempt=attempt) == code
    out, err = capfd.readouterr()
    assert "the store is away" in err
    assert ("elastic-driver" in out) is (code == 101)
    assert backend.started == []


@pytest.mark.parametrize("error", [NobodyAnswers("no head answers"), ElasticError("the control store is away")])
def test_a_head_that_is_away_is_no_end(package: Path, error: ElasticError, capfd: pytest.CaptureFixture[str]) -> None:
    class Away(Backend):
        def attach_run(self, run_id: str, address: str) -> FakeHandle:
            raise error

    assert drive(package, Away(), attempt=2) == DRIVER_LOST

    class Silent(FakeHandle):
        def result(self, timeout_s: float) -> Mapping[str, Any] | None:
            raise error

    assert drive(package, Backend(Silent("r")), "resume", attempt=2) == DRIVER_LOST
    assert "elastic-driver" not in capfd.readouterr().out


def test_a_secret_in_an_error_does_not_reach_the_log(
    package: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "xyzzy-xyzzy")
    alive = FakeHandle("r")
    alive.advance(doing="generation 1 ends: PermissionError: xyzzy-xyzzy is not allowed")
    shown = alive.progress

    def progress() -> Mapping[str, Any]:
        alive.end("user-code-failed", "the training function failed: PermissionError: xyzzy-xyzzy is not allowed")
        return {**shown(), "status": "running"}

    alive.progress = progress  # type: ignore[method-assign]
    assert drive(package, Backend(alive)) == 100
    out, err = capfd.readouterr()
    assert "xyzzy" not in out + err
    assert "generation 1 ends: PermissionError: *** is not allowed" in err
    assert "the training function failed: PermissionError: *** is not allowed" in out


@pytest.mark.parametrize(
    ("mode", "statuses", "code", "starts"),
    [
        ("continue", (), 0, True),
        ("continue", ("running",), 0, True),
        ("continue", ("running", "finished"), 0, False),
        ("continue", ("running", "stopped"), 103, False),
        ("continue", ("running", "gave-up"), 0, True),
        ("resume", ("running", "stopped"), 0, True),
        ("resume", ("running",), 0, True),
        ("new", ("running",), 2, False),
        ("stop", ("running",), 103, False),
        ("stop", ("running", "finished"), 0, False),
    ],
)
def test_without_a_controller_the_journal_decides(
    package: Path, mode: Mode, statuses: tuple[str, ...], code: int, starts: bool
) -> None:
    if statuses:
        settings = RunSettings.from_json({**driver.load_job("job.yaml").settings("r", storage(package)).to_json()})
        RunFolder(storage(package), "r").write("job.json", {"settings": settings.to_json()})
        journal(storage(package), *statuses)
    backend = Backend()
    assert drive(package, backend, mode) == code
    assert bool(backend.started) is starts


def test_a_controller_that_lingers_after_its_run_is_not_in_the_way_of_a_resume(package: Path) -> None:
    RunFolder(storage(package), "r").write("job.json", {"settings": {"seed": 0}})
    backend = Backend(Backend.ended("stopped"))
    assert drive(package, backend, "continue") == 103
    assert drive(package, backend, "resume") == 0
    assert len(backend.started) == 1


def test_sigterm_stops_the_run(package: Path, capfd: pytest.CaptureFixture[str]) -> None:
    alive = FakeHandle("r")
    seen = []

    def progress() -> Mapping[str, Any]:
        if not seen:
            seen.append(os.kill(os.getpid(), signal.SIGTERM))
        return {"status": "running"}

    alive.progress = progress  # type: ignore[method-assign]
    assert drive(package, Backend(alive)) == 103
    assert alive.stop_reason == "the job was stopped"
    assert last_words(capfd)["status"] == "stopped"


def test_a_stop_that_its_controller_has_forgotten_is_told_again(
    package: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Restarted(FakeHandle):
        told = 0

        def stop(self, reason: str) -> None:
            self.told += 1
            if self.told > 1:
                super().stop(reason)

    monkeypatch.setattr(driver, "STOP_AGAIN_S", 0.0)
    alive = Restarted("r")
    assert drive(package, Backend(alive), "stop") == 103
    assert capfd.readouterr().err.count("the job is being stopped") == 1
    monkeypatch.setattr("elastic_jobs.commands.stop.STOP_AGAIN_S", 0.01)
    alive = Restarted("r")
    assert cli.main(["stop", "r", "--storage", storage(package), "--address", "a:1"], Backend(alive)) == 0  # type: ignore[arg-type]
    assert alive.told == 2


def test_sigterm_while_connecting_is_not_lost(package: Path) -> None:
    backend = Backend()
    attach = backend.attach_run

    def slow(run_id: str, address: str) -> FakeHandle:
        os.kill(os.getpid(), signal.SIGTERM)
        return attach(run_id, address)

    backend.attach_run = slow  # type: ignore[method-assign]
    assert drive(package, backend) == 103
    assert backend.started == []


def test_a_run_out_of_reach_is_no_end(package: Path, capfd: pytest.CaptureFixture[str]) -> None:
    alive = FakeHandle("r")

    def progress() -> Mapping[str, Any]:
        raise ElasticError("the controller has not answered for 90 s")

    alive.progress = progress  # type: ignore[method-assign]
    assert drive(package, Backend(alive)) == DRIVER_LOST
    assert last_words(capfd)["event"] == driver_protocol.BEGAN


@pytest.mark.parametrize(
    ("job", "more", "told"),
    [
        (JOB, {"version": "0.0.1"}, "submitted by ray-elastic 0.0.1, and the cluster has"),
        (JOB.replace("driven.py:main", "os:system"), {}, "is not in the submitted package"),
        (JOB.replace("driven.py:main", "../outside.py:main"), {}, "is not in the submitted package"),
        (JOB + "seed: 3\n", {"mode": "resume"}, "was started with seed 0, not 3"),
        (JOB + "nonsense: 3\n", {}, "unknown key 'nonsense'"),
    ],
)
def test_refused(package: Path, job: str, more: dict[str, Any], told: str, capfd: pytest.CaptureFixture[str]) -> None:
    (package.parent / "outside.py").write_text("def main(config): ...\n")
    (package / "job.yaml").write_text(job)
    if more.get("mode") == "resume":
        RunFolder(storage(package), "r").write("job.json", {"settings": {"seed": 0}})
    backend = Backend()
    assert drive(package, backend, **more) == 2
    assert backend.started == []
    words = last_words(capfd)
    assert told in words["reason"]
    assert (words["status"], words["exit_code"], words["run"]) == ("usage", 2, "r")


def test_a_run_is_resumed_with_another_number_of_workers_that_share_experts(package: Path) -> None:
    """Checkpoints hold whole tensors, of all experts."""
    (package / "job.yaml").write_text(JOB.replace("max_workers: 2", "max_workers: 4") + "mesh: {ep: 4}\n")
    folder = RunFolder(storage(package), "r")
    folder.write("job.json", {"settings": {"seed": 0, "mesh": {"sp": 1, "tp": 1, "ep": 2}}})
    backend = Backend()
    drive(package, backend, "resume")
    assert len(backend.started) == 1


def test_a_run_is_resumed_with_other_slices_of_its_layers(package: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (package / "job.yaml").write_text(JOB + "mesh: {tp: 2}\n")
    RunFolder(storage(package), "r").write("job.json", {"settings": {"seed": 0}})
    backend = Backend()
    drive(package, backend, "resume")
    assert len(backend.started) == 1
    said = "saved with no mesh.tp and resumed with mesh: {tp: 2}: dropout inside layers that are cut is drawn anew"
    assert capfd.readouterr().err.count(said) == 1


def test_a_resume_of_a_run_that_is_not_in_storage_does_not_begin_it(package: Path) -> None:
    backend = Backend()
    assert drive(package, backend, "resume") == 102
    assert backend.started == []


def test_what_is_kept_of_the_job_has_nothing_of_its_environment(package: Path) -> None:
    (package / "job.yaml").write_text(JOB + "submit: {env_vars: {PLAIN: xyzzy, OTHER: }}\n")
    assert drive(package, Backend()) == 0
    assert "xyzzy" not in json.dumps(RunFolder(storage(package), "r").read("job.json"))
