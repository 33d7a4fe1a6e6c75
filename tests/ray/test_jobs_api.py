"""A real Jobs server with token authentication: submitted, followed, its driver killed, stopped, resumed, refused.

The command line runs in this process, whose Ray knows no token: it is given to the client as a header. What the
environment's own token comes to is seen from a process of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from elastic_cluster import LocalCluster
from elastic_cluster.local import processes
from elastic_jobs import cli
from elastic_jobs.running.ray_backend import RayBackend
from elastic_jobs.submit import attempts
from elastic_jobs.submit.attempts import JobState
from elastic_jobs.submit.fake_jobs_api import FakeJobsApi
from elastic_jobs.submit.jobs_api import AlreadySubmitted, Denied, DriverNeeds, JobsApi, Submission, Unreachable
from elastic_jobs.submit.ray_jobs_api import RayJobsApi
from harness import HERE, PACKAGES, Footprint, Run, actor_processes, wait_until

from elastic.core.errors import UsageError

pytestmark = pytest.mark.ray

SECRET = "s3cr3t-of-this-test"


@dataclass(frozen=True)
class Place:
    """The cluster, and the command line as somebody who has its token."""

    cluster: LocalCluster
    token: str = field(repr=False)

    @property
    def address(self) -> str:
        return self.cluster.dashboard_url

    def api(self) -> RayJobsApi:
        return RayJobsApi(self.address, {"Authorization": f"Bearer {self.token}"})

    def elastic(self, *words: str) -> int:
        return cli.main([*words, "--address", self.address], _WithToken(self))


class _WithToken(RayBackend):
    def __init__(self, place: Place) -> None:
        self._place = place

    def jobs_api(self, address: str) -> JobsApi:
        return self._place.api()


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with _place_of(2) as place:
        yield place


@contextlib.contextmanager
def _place_of(nodes: int, **options: Any) -> Iterator[Place]:
    token = os.urandom(16).hex()
    environment = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        # What a driver's `python` is, and where it finds this checkout.
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([PACKAGES, os.environ.get("PYTHONPATH", "")]),
    }
    with LocalCluster.start(nodes, cpus_per_node=1, dashboard=True, environment=environment, **options) as cluster:
        footprint = Footprint(cluster)
        yield Place(cluster, token)
        footprint.look()
    assert footprint.left() == []


class Submitted(Run):
    """A run of `loops` that goes through the Jobs API."""

    def __init__(self, place: Place, folder: Path, run_id: str, workers: int) -> None:
        super().__init__(place.cluster, folder, run_id=run_id, epochs=2, config={"size": 47})
        self.place, self.api = place, place.api()
        work = folder / "work"
        (work / "data").mkdir(parents=True)
        (work / "loops.py").write_text((HERE / "loops.py").read_text())
        (work / ".gitignore").write_text("data/\n*.bin\n")
        (work / "data" / "large.bin").write_bytes(bytes(2_000_000))
        # Modules of the user's own, concurrently with training script: nobody else may take them for theirs.
        for name in ("jobs.py", "cluster.py", "utils.py", "elastic_test.py"):
            (work / name).write_text(f"raise SystemExit('{name} was imported')\n")
        self.job = {
            "entry_point": "loops.py:train", "config": self.config, "max_workers": workers, "epochs": 2,
            "checkpoint": {"every_steps": 5}, "snapshots": {"enabled": False}, "storage_url": self.url,
            "stragglers": {"policy": "off"}, "failures": {"hang_floor_s": 300.0},
            "submit": {"package_limit_mb": 1, "env_vars": {"PLAIN": "yes"}},
        }  # fmt: skip
        self.file = work / "job.yaml"
        self.file.write_text(yaml.safe_dump(self.job))

    def submit(self, *more: str) -> int:
        return self.place.elastic("submit", str(self.file), "--run-id", self.settings.run_id, *more)

    def driver(self, attempt: int) -> int:
        """The pid of an attempt's driver, once it has reached the run."""
        wait_until(lambda: '"began"' in self.log(attempt), f"attempt {attempt} to begin")
        found = processes.descendants([self.cluster.keeper_pid], processes.table())  # type: ignore[attr-defined]
        return next(
            pid for pid in found if f"--attempt {attempt} " in _command(pid) and self.settings.run_id in _command(pid)
        )

    def states(self) -> list[JobState]:
        """Of the jobs of the run's attempts."""
        return [record.state for record in attempts.find(self.api.records(), self.settings.run_id).attempts]

    def wait_promises(self) -> int:
        """Until both ranks have promised where to stop."""
        self.wait_for("a planned end", lambda records: len(self.promises(records)) == 2)
        return 0

    def log(self, attempt: int) -> str:
        """Of an attempt so far, where Ray keeps it; "" of one that is not there yet."""
        name = f"job-driver-{attempts.submission_id(self.settings.run_id, attempt)}.log"
        file = self.place.cluster.directory / "ray/session_latest/logs" / name
        return file.read_text() if file.exists() else ""

    def everything_kept(self) -> str:
        files = [path for path in Path(self.url).rglob("*") if path.suffix in (".json", ".jsonl")]
        return "".join(path.read_text(errors="replace") for path in files)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


# Reversed: what the function has seen is the one thing that holds it.
_READER = """
import os
import pathlib

import loops

SEEN = os.environ["SECRET_OF_MINE"]


def train(config):
    (pathlib.Path(config["folder"]) / "seen").write_text(SEEN[::-1])
    loops.train(config)
"""


class CommandLines(threading.Thread):
    """Looks at the command lines of all processes meanwhile: those in which Ray sets up a worker live for a second."""

    def __init__(self, secret: str) -> None:
        super().__init__(daemon=True)
        self._secret = secret
        self._over = threading.Event()
        self.found: list[str] = []

    def __enter__(self) -> CommandLines:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        while not self._over.wait(0.02):
            self.found += [line for pid in processes.table() if self._secret in (line := _command(pid))]


class Following(threading.Thread):
    """`elastic logs -f`, as somebody else."""

    def __init__(self, place: Place, run_id: str) -> None:
        super().__init__(daemon=True)
        self._ask: Callable[[], int] = lambda: place.elastic("logs", run_id, "-f")
        self.code: int | None = None
        self.start()

    def run(self) -> None:
        self.code = self._ask()

    def ended(self) -> int | None:
        self.join(90.0)
        return self.code


@pytest.mark.slow
def test_a_submitted_job_is_followed_to_its_end(
    place: Place, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_MINE", SECRET)
    run = Submitted(place, tmp_path, "straight", workers=1)
    run.job["entry_point"] = "reader.py:train"
    (run.file.parent / "reader.py").write_text(_READER)
    run.file.write_text(yaml.safe_dump(run.job))
    with CommandLines(SECRET) as lines:
        assert run.submit("--env", "SECRET_OF_MINE") == 0
    out, err = capfd.readouterr()
    assert "run straight is finished" in err
    assert "sending 8 files" in err
    assert "attempt 1: started" in out
    run.assert_samples_once()
    # The secret reached the job's code before it was imported, and nothing that others can read.
    assert (tmp_path / "seen").read_text() == SECRET[::-1]
    assert lines.found == []
    record = run.api.find("straight-a1")
    assert record is not None
    told = f"{out}{err}{vars(record)}{record.redacted()}{run.everything_kept()}{run.log(1)}"
    assert SECRET not in told
    logs = [path for path in (place.cluster.directory / "ray/session_latest/logs").rglob("*") if path.is_file()]
    assert [path for path in logs if SECRET in path.read_text(errors="replace")] == []
    assert any("ELASTIC_HANDED_ENVIRONMENT" in path.read_text(errors="replace") for path in logs), "Ray writes it there"
    assert place.elastic("status", "straight", "--json") == 0
    shown = capfd.readouterr().out
    assert SECRET not in shown
    assert "SECRET_OF_MINE" in shown
    # A run that has ended is neither begun again nor stopped.
    assert run.submit() == 2
    assert place.elastic("stop", "straight") == 102


def test_drivers_are_killed_and_nobody_follows_then_the_run_is_stopped_then_resumed(
    place: Place, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = Submitted(place, tmp_path, "eventful", workers=2)
    run.allow(3)
    assert run.submit("--no-follow") == 0
    os.kill(run.driver(1), signal.SIGKILL)
    run.driver(2)
    wait_until(lambda: "attempt 2: attached" in run.log(2), "the second attempt to find the run")
    supervisors = _supervisors(place)
    assert len(supervisors) == 1
    assert [pid for pid in supervisors if "libtorch" in Path(f"/proc/{pid}/maps").read_text()] == []
    # The name is taken: there is never a second trainer.
    capfd.readouterr()
    assert run.submit("--no-follow") == 2
    assert "is running as eventful-a2" in capfd.readouterr().err
    following = Following(place, "eventful")
    run.allow(7)
    run.wait_checkpoint(5)
    assert place.elastic("status", "eventful") == 101

    assert place.elastic("stop", "eventful", "--no-wait") == 0
    run.wait_promises()
    run.allow(1 << 30)
    assert following.ended() == 103
    last = max(run.steps())
    run.wait_checkpoint(last)
    assert run.summary()["status"] == "stopped"
    assert [r["attempt"] for r in run.records("run") if r["status"] == "running"] == [1]

    # A run that is resumed is supervised as one that is new.
    run.allow(last)
    assert place.elastic("resume", "eventful", "--no-follow") == 0
    run.driver(3)
    wait_until(lambda: _supervisors(place), "the run to be supervised again")
    run.allow(1 << 30)
    wait_until(lambda: run.states()[2] is JobState.SUCCEEDED, "the last attempt to tell the run's end")
    run.assert_samples_once()
    assert run.states() == [JobState.FAILED, JobState.STOPPED, JobState.SUCCEEDED]
    wait_until(lambda: not _supervisors(place), "no supervisor to be left")


def _supervisors(place: Place) -> list[int]:
    return [pid for pid, title in actor_processes(place.cluster).items() if "SupervisorActor" in title]


@pytest.mark.slow
def test_a_driver_that_is_lost_with_its_node_is_replaced_on_another(tmp_path: Path) -> None:
    with _place_of(3) as place:
        head = next(node for node in place.cluster.nodes() if node.head)
        run = Submitted(place, tmp_path, "uprooted", workers=3)
        run.job |= {"min_workers": 2, "submit": {"labels": {"ray.io/node-id": f"!{head.node_id}"}}}
        run.file.write_text(yaml.safe_dump(run.job))
        run.allow(6)
        assert run.submit("--no-follow") == 0
        run.driver(1)
        run.wait_checkpoint(5)
        first = run.api.find("uprooted-a1")
        assert first is not None
        lost = next(node for node in place.cluster.nodes() if node.node_id == first.node)
        place.cluster.kill_node(lost.name)
        # Training does not wait for a driver.
        run.wait_generation(2)
        run.driver(2)
        second = run.api.find("uprooted-a2")
        assert second is not None
        assert len({head.node_id, first.node, second.node}) == 3
        run.allow(1 << 30)
        wait_until(lambda: run.states()[1:] == [JobState.SUCCEEDED], "the second attempt to tell the run's end")
        run.assert_samples_once()
        assert [generation["world_size"] for generation in run.summary()["generations"]] == [3, 2]
        assert run.states()[0] is JobState.FAILED
        wait_until(lambda: not _supervisors(place), "no supervisor to be left")


@pytest.mark.slow
def test_a_driver_that_is_lost_while_the_control_store_is_away_is_replaced_when_it_is_back(tmp_path: Path) -> None:
    with _place_of(2, durable_control_store=True) as place:
        run = Submitted(place, tmp_path, "headless", workers=2)
        run.allow(6)
        assert run.submit("--no-follow") == 0
        driver = run.driver(1)
        run.wait_checkpoint(5)
        supervisors = wait_until(lambda: _supervisors(place), "the run to be supervised")
        place.cluster.kill_control_store()
        os.kill(driver, signal.SIGKILL)
        run.wait_for("the outage to be told", lambda _: run.decisions("control-store"))
        place.cluster.restart_control_store()
        run.driver(2)
        assert _supervisors(place) == supervisors
        run.allow(1 << 30)
        wait_until(lambda: run.states() == [JobState.FAILED, JobState.SUCCEEDED], "the run's end to be told")
        run.assert_samples_once()
        wait_until(lambda: not _supervisors(place), "no supervisor to be left")


@pytest.mark.slow
def test_what_a_job_brings_along_is_there_for_its_driver_and_its_workers(place: Place, tmp_path: Path) -> None:
    """By `py_modules`. By `pip` it works alike, but has Ray copy this whole environment for each node."""
    run = Submitted(place, tmp_path, "bringer", workers=1)
    run.job["submit"]["py_modules"] = [f"file://{_wheel(tmp_path / 'brought_along-1.0-py3-none-any.whl')}"]
    run.job["entry_point"] = "bringer.py:train"
    (run.file.parent / "bringer.py").write_text("import brought_along\nfrom loops import train as train\n")
    run.file.write_text(yaml.safe_dump(run.job))
    assert run.submit() == 0
    run.assert_samples_once()


def _wheel(file: Path) -> Path:
    about = "brought_along-1.0.dist-info"
    with zipfile.ZipFile(file, "w") as wheel:
        wheel.writestr("brought_along.py", "")
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: brought-along\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    return file


def test_bad_tokens_and_addresses(place: Place) -> None:
    with pytest.raises(Denied, match="requires a token"):
        RayJobsApi(place.address)
    with pytest.raises(Denied, match="refuses this token"):
        RayJobsApi(place.address, {"Authorization": "Bearer nonsense"})
    with pytest.raises(Unreachable, match="no Ray Jobs server answers"):
        RayJobsApi("http://127.0.0.1:1")


def test_the_token_of_the_environment(place: Place) -> None:
    words = [sys.executable, "-m", "elastic_jobs.cli", "list", "--address", place.address, "--json"]
    right = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": place.token, "PYTHONPATH": PACKAGES}
    listed = subprocess.run(words, env=right, capture_output=True, text=True, timeout=60, check=False)
    assert listed.returncode == 0, listed.stderr
    assert place.token not in listed.stdout + listed.stderr
    assert {"straight", "eventful", "bringer"} >= {json.loads(line)["run_id"] for line in listed.stdout.splitlines()}


# -- the contract of JobsApi, of the real one and of the fake ----------------------------------------------------------


@pytest.fixture(params=["fake", "real"])
def api(request: pytest.FixtureRequest) -> JobsApi:
    if request.param == "real":
        found: Place = request.getfixturevalue("place")
        return found.api()
    fake = FakeJobsApi()

    def play(submission: Submission) -> None:
        echo = re.match(r"echo (\w+); exit (\d)", submission.entrypoint)
        if echo is not None:
            fake.say(submission.submission_id, echo[1])
            code = int(echo[2])
            fake.end(submission.submission_id, JobState.FAILED if code else JobState.SUCCEEDED, code, message="exit")

    fake.play = play
    return fake


def test_contract(api: JobsApi) -> None:
    about = attempts.metadata("contract", 1, "/runs", "0")

    def submission(name: str, entrypoint: str, **runtime_env: Any) -> Submission:
        return Submission(name, entrypoint, about, DriverNeeds(memory_bytes=10**6), runtime_env)

    def ended(name: str) -> Mapping[str, Any] | None:
        record = api.find(name)
        return vars(record) if record is not None and record.state.ended else None

    assert api.cluster().nodes
    assert api.find("contract-x") is None
    api.submit(submission("contract-a1", "echo hello; exit 3", env_vars={"A": "b"}))
    with pytest.raises(AlreadySubmitted):
        api.submit(submission("contract-a1", "echo again; exit 0"))
    first = wait_until(lambda: ended("contract-a1"), "the first job to end")
    assert (first["state"], first["exit_code"], first["run_id"], first["attempt"]) == (
        JobState.FAILED,
        3,
        "contract",
        1,
    )
    assert first["runtime_env"]["env_vars"] == {"A": "b"}
    assert first["error_type"] == "JOB_ENTRYPOINT_COMMAND_ERROR"
    log = "".join(api.tail("contract-a1", 0, ended=True))
    assert "hello\n" in log
    assert "".join(api.tail("contract-a1", 0, ended=False)) == log
    assert "".join(api.tail("contract-a1", len(log) - 3, ended=False)) == log[-3:]
    assert "".join(api.tail("contract-a1", len(log) - 3, ended=True)) == log[-3:]
    api.submit(submission("contract-a2", "exec sleep 600"))
    wait_until(lambda: (api.find("contract-a2") or first).state is JobState.RUNNING, "the second job to run")  # type: ignore[attr-defined]
    assert api.stop("contract-a2")
    assert wait_until(lambda: ended("contract-a2"), "the second job to end")["state"] is JobState.STOPPED
    # Its supervisor lives a moment longer than the job.
    wait_until(lambda: not api.stop("contract-a2"), "a stop that finds nobody")
    assert {"contract-a1", "contract-a2"} <= {record.submission_id for record in api.records()}
    with pytest.raises(UsageError, match="no longer has the package"):
        api.submit(submission("contract-a3", "echo never; exit 0", working_dir="gcs://_ray_pkg_0123456789abcdef.zip"))
