"""elastic stop and watch of runs that are away, gone or not there."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import pytest
from cli_fakes import FakeBackend
from elastic_jobs import cli
from elastic_jobs.run_folder import RunFolder
from elastic_jobs.running.handle import FakeHandle
from elastic_jobs.running.live import Live, write_live

from elastic.core.errors import ElasticError, NobodyAnswers, UsageError
from elastic.observe.journal import JournalWriter


@pytest.mark.parametrize("error", [NobodyAnswers("nobody answers"), ElasticError("the control store is away")])
def test_watch_and_stop_wait_for_a_head_that_is_away(
    job: Path, error: ElasticError, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_jobs.running.live._PAUSE_S", 0.0)
    write_live(RunFolder("runs", "r1"), Live("a:1"))
    JournalWriter("runs", "r1").append({"type": "run", "run_id": "r1", "status": "running"})

    class Away(FakeBackend):
        tries = 0

        def attach_run(self, run_id: str, address: str) -> FakeHandle:
            self.tries += 1
            if self.tries < 4:
                raise error
            return self.handle

    assert cli.main(["stop", "r1"], Away()) == 0
    assert capfd.readouterr().err.count("retrying") == 1
    backend = Away()
    backend.handle.end("finished")
    assert cli.main(["watch", "r1"], backend) == 0


@pytest.mark.parametrize(
    ("status", "error"), [("running", UsageError("another token")), ("stopped", NobodyAnswers("nobody answers"))]
)
def test_but_not_where_that_would_not_help(
    job: Path, status: str, error: ElasticError, capfd: pytest.CaptureFixture[str]
) -> None:
    write_live(RunFolder("runs", "r1"), Live("a:1"))
    JournalWriter("runs", "r1").append({"type": "run", "run_id": "r1", "status": status})

    class Gone(FakeBackend):
        def attach_run(self, run_id: str, address: str) -> FakeHandle:
            raise error

    assert cli.main(["stop", "r1"], Gone()) == 102
    assert f"run 'r1' cannot be reached at a:1: {error}" in capfd.readouterr().err


@pytest.mark.parametrize("notice", ["0", "-1", "nan", "inf"])
def test_a_notice_is_a_time(notice: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["drain", "node-1", "--address", "a:1", "--notice", notice], FakeBackend()) == 2
    assert "a node needs some seconds to leave in good order" in capfd.readouterr().err


@pytest.mark.parametrize("command", ["resume", "watch", "stop", "story", "checkpoints"])
def test_a_run_that_is_not_there(job: Path, command: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "nope"], FakeBackend()) == 102
    out, err = capfd.readouterr()
    assert out == ""
    assert "nope" in err


def test_stop_waits_for_the_end(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_live(RunFolder("runs", "r1"), Live("a:1"))
    backend = FakeBackend()
    assert cli.main(["stop", "r1"], backend) == 0
    assert backend.handle.stop_reason == "elastic stop"
    assert "is stopped" in capfd.readouterr().err


def test_the_fake_handle_wakes_its_waiters() -> None:
    handle = FakeHandle()
    reached: list[bool] = []
    waiter = threading.Thread(target=lambda: reached.append(handle.wait_step(3, 60.0)))
    waiter.start()
    handle.advance(step=3)
    waiter.join()
    assert reached == [True]
    handle.end("finished")
    assert not handle.wait_step(9, 60.0)


@pytest.mark.parametrize(("status", "said"), [("finished", "it is finished since step 10"), (None, "no run 'r1'")])
def test_stop_of_a_run_that_is_not_going_on(
    job: Path, status: str | None, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    backend = FakeBackend(status or "")
    if status is not None:
        assert cli.main(["run", "job.yaml", "--run-id", "r1"], backend) == 0
    assert cli.main(["stop", "r1"], FakeBackend()) == 102
    assert said in capfd.readouterr().err
    assert backend.handle.stop_reason is None


def test_a_run_that_is_nearly_named_so(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "job.yaml", "--run-id", "gpt-large"], FakeBackend()) == 0
    assert cli.main(["resume", "gpt-lrage"], FakeBackend()) == 102
    assert "there is no run 'gpt-lrage'" in (err := capfd.readouterr().err)
    assert "did you mean 'gpt-large'?" in err


@pytest.mark.parametrize(("held", "code"), [(40, 101), (None, 101), (43, 0)])
def test_stop_says_what_storage_has_not_taken(
    job: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, held: int | None, code: int
) -> None:
    write_live(RunFolder("runs", "r1"), Live("a:1"))
    backend = FakeBackend()
    end = partial(backend.handle.end, step=43, checkpoint_step=held)
    monkeypatch.setattr(backend.handle, "stop", lambda reason: end("stopped", reason))
    assert cli.main(["stop", "r1"], backend) == code
    assert ("will be done again" in capfd.readouterr().err) == bool(code)
