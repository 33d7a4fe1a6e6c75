"""The command line over fakes: exit codes, streams, what starts when, and what Ctrl-C does."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from elastic_cluster.source import ClusterError, NodeInfo, NodeState
from elastic_jobs import cli
from elastic_jobs.commands import run as run_command
from elastic_jobs.run_folder import RunFolder, new_run_id
from elastic_jobs.running import handover
from elastic_jobs.running.backend import Growth, NodeShape, NotStarted
from elastic_jobs.running.fault_injection import Faults, parse_faults
from elastic_jobs.running.handle import FakeHandle
from elastic_jobs.running.live import Live, read_live, write_live
from elastic_jobs.running.run_plan import Job, RunPlan
from elastic_jobs.submit.fake_jobs_api import FakeJobsApi

import elastic
from elastic.core.errors import ElasticError, NobodyAnswers, RunNotFound, TokenRefused, UsageError, UserCodeError
from elastic.core.settings import RunSettings
from elastic.observe.journal import JournalWriter

JOB = """
entry_point: cli_train.py:main
min_workers: 2
max_workers: 4
max_steps: 10
resources_per_worker: {CPU: 2, GPU: 1, TPU: 3}
"""


class FakeCluster:
    address = "127.0.0.1:1"
    socket_path = Path("/nowhere/keeper.sock")

    def __init__(self) -> None:
        self.log: list[str] = []

    def nodes(self) -> tuple[NodeInfo, ...]:
        return tuple(NodeInfo(f"node-{i}", NodeState.ALIVE, head=i == 0, node_id=f"{i:02x}") for i in range(3))

    def _done(self, what: str, name: str | None) -> NodeInfo:
        self.log.append(f"{what} {name}")
        return self.nodes()[1]

    def kill_node(self, name: str) -> NodeInfo:
        return self._done("kill-node", name)

    def add_node(self, name: str | None = None) -> NodeInfo:
        return self._done("add-node", name)

    def freeze_node(self, name: str) -> NodeInfo:
        return self._done("freeze-node", name)

    def thaw_node(self, name: str) -> NodeInfo:
        return self._done("thaw-node", name)

    def drain_node(self, name: str) -> NodeInfo:
        return self._done("drain-node", name)

    def kill_worker(self, pid: int) -> NodeInfo:
        return self._done("kill-worker", str(pid))

    def kill_control_store(self) -> NodeInfo:
        return self._done("kill-control-store", None)

    def restart_control_store(self) -> NodeInfo:
        return self._done("restart-control-store", None)

    def detach(self) -> None:
        self.log.append("detach")

    def shutdown(self) -> None:
        self.log.append("shutdown")


class FakeBackend:
    """`script` plays the run: it gets the handle as soon as the run has started."""

    def __init__(self, status: str = "finished", **more: Any) -> None:
        self.cluster = FakeCluster()
        self.handle = FakeHandle()
        self.status, self.more = status, more
        self.calls: list[Any] = []
        self.reachable = True

    def start_cluster(self, nodes: int, shape: NodeShape, python_path: str, durable: bool = False) -> FakeCluster:
        self.calls.append(("cluster", nodes, shape))
        return self.cluster

    def start_autoscaled(self, growth: Growth, shape: NodeShape, python_path: str) -> FakeCluster:
        self.calls.append(("autoscaled", growth, shape))
        return self.cluster

    def attach_cluster(self, socket_path: str) -> FakeCluster:
        return self.cluster

    def start_run(self, job: Job, address: str) -> FakeHandle:
        settings = job.settings
        self.calls.append(("run", settings, job.entry_point, dict(job.config), address))
        writer = JournalWriter(settings.storage_url, settings.run_id)
        writer.append({"type": "run", "run_id": settings.run_id, "status": "running"})
        self.play(writer)
        return self.handle

    def play(self, writer: JournalWriter) -> None:
        writer.append({"type": "run", "status": self.status, "step": 10, "loss": 1.5})
        self.handle.advance(step=10, loss=1.5)
        self.handle.end(self.status, "because", **self.more)

    def attach_run(self, run_id: str, address: str) -> FakeHandle:
        if not self.reachable:
            raise RunNotFound(f"no controller of {run_id} at {address}")
        return self.handle

    def disconnect(self) -> None:
        self.cluster.log.append("disconnect")


class InterruptedHandle(FakeHandle):
    """Ctrl-C while it is followed."""

    def progress(self) -> Mapping[str, Any]:
        raise KeyboardInterrupt


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ELASTIC_STORAGE", raising=False)
    # The operator's own name for the cluster that is in most of the runs' folders.
    monkeypatch.setenv("RAY_ADDRESS", "a:1")
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    (tmp_path / "cli_train.py").write_text("def main(config): ...\n")
    (tmp_path / "job.yaml").write_text(JOB)
    yield tmp_path / "job.yaml"
    __import__("sys").modules.pop("cli_train", None)


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


@pytest.mark.parametrize(
    "arguments", [[], ["fly"], ["run"], ["run", "a", "--nodes", "0"], ["run", "a", "--nodes", "x"]]
)
def test_bad_arguments_are_usage(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments, FakeBackend())
    assert caught.value.code == 2


@pytest.mark.parametrize("command", ["run", "resume", "watch", "stop", "story", "checkpoints"])
def test_help_has_an_example_and_the_exit_codes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    text = capsys.readouterr().out
    assert f"example:\n  elastic {command} " in text
    assert "105 no capacity" in text


def test_a_run_id_is_used_once(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "job.yaml", "--run-id", "r1"], FakeBackend()) == 0
    assert cli.main(["run", "job.yaml", "--run-id", "r1"], FakeBackend()) == 2
    assert "elastic resume" in capfd.readouterr().err


def test_resume_takes_the_job_as_it_was(job: Path) -> None:
    first, second = FakeBackend("gave-up"), FakeBackend()
    assert cli.main(["run", "job.yaml", "--run-id", "r1"], first) == 104
    job.unlink()
    assert cli.main(["resume", "r1", "--max-steps", "20"], second) == 0
    (_, before, entry, config, _), (_, after, entry_2, config_2, _) = first.calls[1], second.calls[1]
    assert (entry, config) == (entry_2, config_2)
    assert after.max_steps == 20
    assert after.checkpoint == before.checkpoint


def test_resume_of_a_run_that_goes_on_is_refused(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "job.yaml", "--run-id", "r1"], FakeBackend("stopped")) == 103
    write_live(RunFolder("runs", "r1"), Live("a:1"))
    alive = FakeBackend()
    assert cli.main(["resume", "r1"], alive) == 2
    assert "elastic watch r1" in capfd.readouterr().err
    silent = FakeBackend()
    silent.attach_run = refuse  # type: ignore[method-assign]
    assert cli.main(["resume", "r1"], silent) == 0
    assert "cannot be reached at a:1: nobody answers; it is considered over" in capfd.readouterr().err
    write_live(RunFolder("runs", "r1"), Live("a:1"))
    gone = FakeBackend()
    gone.reachable = False
    assert cli.main(["resume", "r1"], gone) == 0
    assert "considered over" not in capfd.readouterr().err


@pytest.mark.parametrize(("where", "hint"), [([], True), (["--address", "a:1"], False)])
def test_resume_does_not_go_on_where_it_may_not_look(
    job: Path, where: list[str], hint: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "job.yaml", "--run-id", "r1"], FakeBackend("stopped")) == 103
    write_live(RunFolder("runs", "r1"), Live("a:1"))

    class Locked(FakeBackend):
        def attach_run(self, run_id: str, address: str) -> FakeHandle:
            raise TokenRefused("the Ray cluster at 'a:1' asks for a token")

    capfd.readouterr()
    locked = Locked()
    assert cli.main(["resume", "r1", *where], locked) == 2
    err = capfd.readouterr().err
    assert "run 'r1' cannot be reached at a:1: the Ray cluster at 'a:1' asks for a token" in err
    assert ("remove live.json" in err) is hint
    assert err.count("\n") == 1
    assert locked.calls == []
    assert read_live(RunFolder("runs", "r1")) == Live("a:1")


def refuse(run_id: str, address: str) -> FakeHandle:
    raise NobodyAnswers("nobody answers")


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


class Display:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def update(self, progress: Mapping[str, Any]) -> None: ...

    def note(self, sentence: str) -> None:
        self.notes.append(sentence)

    def close(self) -> None: ...


WORKERS = [
    {"rank": 0, "node": "00", "pid": 100},
    {"rank": 1, "node": "01", "pid": 101},
    {"rank": None, "node": "02", "pid": 102},
]


def test_faults_are_injected_in_order_by_step_where_the_run_is() -> None:
    cluster, handle, display = FakeCluster(), FakeHandle(), Display()
    handle.advance(step=9, workers=WORKERS, controller_pid=7)
    text = "add-node@step=4,kill-node@step=2,kill-worker:1@step=5,kill-controller@step=6,thaw-node@step=7"
    thread = Faults(parse_faults(text), cluster, handle)
    thread._run(display)
    # The last node carries no rank, so the one before it is struck.
    assert cluster.log == ["kill-node node-1", "add-node None", "kill-worker 101", "kill-worker 7"]
    assert display.notes[-1] == "could not inject thaw-node@step=7: no node is frozen"


def test_faults_that_are_not_reached_are_left() -> None:
    handle = FakeHandle()
    handle.advance(step=3, workers=WORKERS)
    handle.end("finished")
    thread = Faults(parse_faults("kill-node@step=2,add-node@step=4"), FakeCluster(), handle)
    thread._run(Display())
    assert str(thread._plan) == "add-node@step=4"


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


def test_ctrl_c_of_a_watcher_leaves_the_run_alone(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    backend = FakeBackend()
    backend.handle = InterruptedHandle()
    backend.play = lambda writer: None  # type: ignore[method-assign]
    assert cli.main(["run", "job.yaml", "--run-id", "r1", "--address", "a:1"], backend) == 101
    assert cli.main(["watch", "r1"], backend) == 101
    assert backend.cluster.log == []
    assert capfd.readouterr().err.count("detached; run r1 goes on") == 2


def test_the_local_cluster_is_shut_down_when_the_run_cannot_start(job: Path) -> None:
    class Broken(FakeBackend):
        def start_run(self, *_: Any) -> FakeHandle:
            raise UserCodeError("no")

    backend = Broken()
    assert cli.main(["run", "job.yaml"], backend) == 100
    assert backend.cluster.log == ["disconnect", "shutdown"]


def test_watch_of_a_finished_run_tells_its_end(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cli.main(["run", "job.yaml", "--run-id", "r1"], FakeBackend())
    capfd.readouterr()
    assert cli.main(["watch", "r1", "--json"], FakeBackend()) == 0
    assert json.loads(capfd.readouterr().out)["status"] == "finished"


def test_stop_waits_for_the_end(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_live(RunFolder("runs", "r1"), Live("a:1"))
    backend = FakeBackend()
    assert cli.main(["stop", "r1"], backend) == 0
    assert backend.handle.stop_reason == "elastic stop"
    assert "is stopped" in capfd.readouterr().err


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


def test_storage_comes_from_the_argument_before_the_environment(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_STORAGE", str(job.parent / "env"))
    backend = FakeBackend()
    assert cli.main(["run", "job.yaml", "--run-id", "r1"], backend) == 0
    assert backend.calls[1][1].storage_url == str(job.parent / "env")
    assert cli.main(["story", "r1", "--storage", "elsewhere"], FakeBackend()) == 102
    assert cli.main(["story", "r1"], FakeBackend()) == 0


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


def test_new_run_ids_are_valid_whatever_the_name() -> None:
    assert new_run_id("my run: ../x", 0.0).startswith("my-run-x-19700101-000000-")
    assert new_run_id("???", 0.0).startswith("run-1970")


# -- the command line itself -------------------------------------------------------------------------------------------


def exits(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(list(words), FakeBackend())
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_the_version_and_what_it_runs_on(capfd: pytest.CaptureFixture[str]) -> None:
    assert exits("--version") == 0
    out = capfd.readouterr().out
    assert out.startswith(f"ray-elastic {elastic.__version__} (ray ")
    assert "deepspeed" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sumbit"], "unknown command 'sumbit'; did you mean 'submit'?"),
        (["kube", "rendr"], "unknown command 'rendr'; did you mean 'render'?"),
        (["xyzzy"], "unknown command 'xyzzy'; there are run, submit,"),
        (["run", "job.yaml", "--noodes", "3"], "unknown argument '--noodes'; did you mean '--nodes'?"),
        (
            ["kube", "render", "job.yaml", "--namespce=x"],
            "unknown argument '--namespce=x'; did you mean '--namespace'?",
        ),
        (["run", "job.yaml", "more"], "elastic run: error: unknown argument 'more'\n"),
    ],
)
def test_a_typo_gets_the_nearest_word(words: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert exits(*words) == 2
    assert said in capfd.readouterr().err


def completed(script: str, shell: str, *words: str) -> set[str]:
    line = " ".join(words)
    ask = f"COMP_WORDS=({line}); COMP_CWORD=$((${{#COMP_WORDS[@]}}-1)); _elastic; echo ${{COMPREPLY[@]}}"
    done = subprocess.run([shell, "-c", f"{script}\n{ask}"], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


def test_bash_completes_commands_and_options(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "bash"], FakeBackend()) == 0
    script = capfd.readouterr().out
    assert completed(script, "bash", "elastic", "re") == {"resume", "report"}
    assert completed(script, "bash", "elastic", "kube", "rend") == {"render"}
    assert {"--nodes", "--node-every"} == completed(script, "bash", "elastic", "run", "--no")
    assert completed(script, "bash", "elastic", "run", "job.yaml", "--nodes", "3", "--cha") == {"--chaos"}


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_a_script_that_they_can_read(shell: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell], FakeBackend()) == 0
    script = capfd.readouterr().out
    assert "resume" in script
    assert "--node-every" in script
    if shutil.which(shell) is not None:
        subprocess.run([shell, "-n"], input=script, text=True, timeout=60, check=True)


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


@pytest.mark.parametrize("where", ["storage_url: memory://x", "checkpoint: {url: 'memory://x'}"])
def test_the_memory_of_one_process_is_no_storage(job: Path, where: str, capfd: pytest.CaptureFixture[str]) -> None:
    job.write_text(f"{JOB}{where}\n")
    assert cli.main(["run", "job.yaml"], FakeBackend()) == 2
    assert "storage 'memory://x' is the memory of one process" in capfd.readouterr().err


# -- resume: what is done stays done -----------------------------------------------------------------------------------


def test_an_end_before_what_is_done_is_refused_and_nothing_changes(
    job: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "job.yaml", "--run-id", "r1"], FakeBackend("stopped")) == 103
    JournalWriter("runs", "r1").append({"type": "checkpoint", "id": "step-00000012-g0001", "step": 12})
    put_checkpoint("runs", 12)
    before = RunFolder("runs", "r1").read("job.json")
    backend = FakeBackend()
    assert cli.main(["resume", "r1", "--max-steps", "11"], backend) == 2
    assert "--max-steps 11 is below the 12 steps that run 'r1' has done already" in capfd.readouterr().err
    assert (backend.calls, RunFolder("runs", "r1").read("job.json")) == ([], before)
    assert cli.main(["resume", "r1", "--max-steps", "12"], backend) == 0
    assert backend.calls[-1][1].max_steps == 12


def put_checkpoint(storage: str, step: int) -> None:
    folder = Path(storage, "r1", "checkpoints", f"step-{step:08d}-g0001")
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")


def saved(storage: str, step: int, *, job: str = "job.yaml") -> None:
    assert cli.main(["run", job, "--run-id", "r1"], FakeBackend("stopped")) == 103
    JournalWriter(storage, "r1").append({"type": "checkpoint", "id": f"step-{step:08d}-g0001", "step": step})
    put_checkpoint(storage, step)


def test_a_moved_run_goes_on_from_its_own_checkpoints(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    saved("runs", 7)
    shutil.copytree("runs", "elsewhere")
    backend = FakeBackend()
    assert cli.main(["resume", "r1", "--storage", "elsewhere"], backend) == 0
    settings = backend.calls[-1][1]
    assert settings.checkpoint.url == settings.storage_url == str(Path("elsewhere").absolute())
    shutil.rmtree("elsewhere/r1/checkpoints")
    assert cli.main(["resume", "r1", "--storage", "elsewhere", "--max-steps", "99"], backend) == 2
    assert "lists 1 checkpoints, the last of step 7, and none is in" in capfd.readouterr().err


def test_a_copy_of_a_run_may_not_delete_the_checkpoints_of_the_original(
    job: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job.write_text(job.read_text() + "checkpoint: {url: ./saved}\nstorage_url: ./runs\n")
    saved("runs", 7)
    shutil.move("runs/r1/checkpoints", "saved/r1/checkpoints")
    shutil.copytree("runs", "elsewhere")
    assert cli.main(["resume", "r1", "--storage", "elsewhere"], FakeBackend()) == 2
    assert "is a copy: run 'r1' is still in" in capfd.readouterr().err
    shutil.rmtree("runs/r1")
    backend = FakeBackend()
    assert cli.main(["resume", "r1", "--storage", "elsewhere"], backend) == 0
    assert backend.calls[-1][1].checkpoint.url == str(Path("saved").absolute())


def test_a_job_file_that_is_cut_off_is_said_with_the_way_out(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    saved("runs", 7)
    file = Path("runs/r1/job.json")
    file.write_bytes(file.read_bytes()[:40])
    assert cli.main(["resume", "r1"], FakeBackend()) == 106
    err = capfd.readouterr().err
    assert "job.json of run 'r1'" in err
    assert "remove that file, then `elastic run JOB.yaml --run-id r1` goes on from the newest checkpoint" in err
    file.unlink()
    assert cli.main(["run", "job.yaml", "--run-id", "r1"], FakeBackend()) == 0


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


@pytest.mark.parametrize("more", [[], ["--max-steps", "10"]])
def test_resume_of_a_finished_run_says_so_at_once(
    job: Path, more: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "job.yaml", "--run-id", "r1"], FakeBackend()) == 0
    capfd.readouterr()
    backend = FakeBackend()
    assert cli.main(["resume", "r1", "--json", *more], backend) == 0
    out, err = capfd.readouterr()
    assert "run r1 is finished after step 10" in err
    assert json.loads(out)["steps"] == 10
    assert backend.calls == []
    assert cli.main(["resume", "r1", "--max-steps", "20"], backend) == 0
    assert backend.calls[-1][1].max_steps == 20


# -- status and logs of a run that was not submitted -------------------------------------------------------------------


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
