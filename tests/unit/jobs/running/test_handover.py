"""Ctrl-C: who owns the cluster afterwards, and what is left of the faults."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import Display, FakeBackend, InterruptedHandle
from elastic_jobs import cli
from elastic_jobs.run_folder import RunFolder
from elastic_jobs.running import handover
from elastic_jobs.running.handle import FakeHandle
from elastic_jobs.running.live import Live, read_live
from elastic_jobs.running.run_plan import Job, RunPlan

from elastic.core.settings import RunSettings


def test_ctrl_c_hands_a_local_cluster_over_with_the_faults_left(
    job: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Any] = []

    def hand_over(plan: RunPlan, cluster_socket: str, address: str, folder: RunFolder) -> None:
        taken.append((RunPlan.from_json(json.loads(json.dumps(plan.to_json()))), cluster_socket, address))
        assert taken[0][0] == plan

    monkeypatch.setattr(handover, "hand_over", hand_over)
    backend = FakeBackend()
    backend.handle = InterruptedHandle()
    backend.play = lambda writer: None  # type: ignore[method-assign]
    code = cli.main(["run", "job.yaml", "--run-id", "r1", "--chaos", "kill-node@step=4", "--summary", "s"], backend)
    assert code == 101
    assert backend.cluster.log == ["detach"]
    ((plan, socket, address),) = taken
    assert (str(plan.place.faults), plan.output.summary_file) == ("kill-node@step=4", str(job.parent / "s"))
    assert (socket, address) == ("/nowhere/keeper.sock", "127.0.0.1:1")
    err = capfd.readouterr().err
    assert f"elastic watch r1 --storage {job.parent}/runs" in err
    assert read_live(RunFolder("runs", "r1")) == Live("127.0.0.1:1", "/nowhere/keeper.sock")


def test_ctrl_c_follows_on_when_nobody_can_take_over(
    job: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Once(FakeHandle):
        interrupted = False

        def progress(self) -> Mapping[str, Any]:
            if not self.interrupted:
                self.interrupted = True
                raise KeyboardInterrupt
            self.end("finished")
            return super().progress()

    monkeypatch.setattr(handover, "hand_over", lambda *_: "no memory")
    backend = FakeBackend()
    backend.handle = Once()
    backend.play = lambda writer: None  # type: ignore[method-assign]
    assert cli.main(["run", "job.yaml"], backend) == 0
    assert backend.cluster.log == ["disconnect", "shutdown"]
    assert "no memory" in capfd.readouterr().err


def test_a_second_ctrl_c_does_not_end_the_run_that_is_handed_over(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "hand_over", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    backend = FakeBackend()
    backend.handle = InterruptedHandle()
    backend.play = lambda writer: None  # type: ignore[method-assign]
    # Whoever runs the tests in the background has it ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert cli.main(["run", "job.yaml"], backend) == 101
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert backend.cluster.log == ["detach"]


@pytest.mark.parametrize(("answer", "stopped"), [("y\n", "Ctrl-C"), ("\n", None)])
def test_a_second_ctrl_c_asks_whether_to_stop(
    job: Path, answer: str, stopped: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(handover, "hand_over", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    monkeypatch.setattr("elastic_jobs.terminal.sys.stdin", Terminal(answer))
    asked = Terminal()
    monkeypatch.setattr("elastic_jobs.terminal.sys.stderr", asked)
    monkeypatch.setattr("elastic_jobs.running.follow.open_display", lambda stream: Display())
    backend = FakeBackend()
    backend.handle = InterruptedHandle()
    backend.play = lambda writer: None  # type: ignore[method-assign]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert cli.main(["run", "job.yaml", "--run-id", "r1"], backend) == 101
    finally:
        signal.signal(signal.SIGINT, before)
    assert "stop run r1, with a last checkpoint? [y/N]" in asked.getvalue()
    assert backend.handle.stop_reason == stopped
    assert ("continues" in asked.getvalue()) is not bool(stopped)
    assert backend.cluster.log == ["detach"]


def test_a_background_process_that_ends_at_once_takes_nothing_over(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(str(job.parent), "r1")
    folder.write("job.json", {})
    monkeypatch.setattr("sys.executable", "/bin/true")
    # More than a pipe holds, so that the process is gone before all is written.
    plan = RunPlan(Job(RunSettings("r1"), "a:b", {"x": "x" * 2_000_000}))
    told = handover.hand_over(plan, "/nowhere", "a:1", folder)
    assert told is not None
    assert "ended at once" in told
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    told = handover.hand_over(plan, "/nowhere", "a:1", folder)
    assert told is not None
    assert "no background process can be started" in told


def test_ctrl_c_of_a_watcher_leaves_the_run_alone(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    backend = FakeBackend()
    backend.handle = InterruptedHandle()
    backend.play = lambda writer: None  # type: ignore[method-assign]
    assert cli.main(["run", "job.yaml", "--run-id", "r1", "--address", "a:1"], backend) == 101
    assert cli.main(["watch", "r1"], backend) == 101
    assert backend.cluster.log == []
    assert capfd.readouterr().err.count("detached; run r1 continues") == 2
