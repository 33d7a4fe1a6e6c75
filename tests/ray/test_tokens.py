"""A cluster that asks for a token: who does not show it is told so at once, and nobody else ever sees it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from elastic_cluster import LocalCluster
from elastic_cluster.local import processes
from elastic_jobs.job_file.load import load_job
from elastic_jobs.run_folder import RunFolder
from elastic_jobs.running.live import Live, write_live

pytestmark = pytest.mark.ray

_ROOT = Path(__file__).resolve().parents[2]
_JOB = """
entry_point: train_with_token:train
max_workers: 1
max_steps: 1
checkpoint: {every_steps: 1}
"""
_JOIN = "import sys; from elastic.runtime.driver import client; client.connect(sys.argv[1]); print('joined')"


@pytest.fixture(scope="module")
def guarded() -> Iterator[LocalCluster]:
    with LocalCluster.start(1, cpus_per_node=1, token=True) as cluster:
        yield cluster


def _environment(folder: Path, **more: str) -> dict[str, str]:
    """Without any token of whoever runs this test."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    paths = os.pathsep.join(map(str, (_ROOT, _ROOT / "jobs", _ROOT / "cluster", folder)))
    return {**kept, "PYTHONPATH": paths, "HOME": str(folder), **more}


def _python(*arguments: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_the_token_opens_the_cluster_and_is_nowhere_but_in_its_file(guarded: LocalCluster, tmp_path: Path) -> None:
    file = guarded.token_file
    assert file is not None
    environment = _environment(tmp_path, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(file))
    joined = _python("-c", _JOIN, guarded.address, environment=environment)
    assert joined.stdout == "joined\n", joined.stderr

    token = file.read_bytes()
    pids = processes.descendants([guarded.keeper_pid], processes.table()) | {guarded.keeper_pid}
    shown = [f"/proc/{pid}/{what}" for pid in pids for what in ("cmdline", "environ")]
    written = [str(path) for path in guarded.directory.rglob("*") if path.is_file() and path != file]
    assert len(written) > 5, "logs are looked through"
    assert [path for path in (*shown, *written) if token in _content(path)] == []


def _content(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:  # It has ended meanwhile.
        return b""


@pytest.mark.parametrize("shown", ["none", "no file", "another one"])
def test_without_the_token_a_run_is_refused_in_one_sentence(guarded: LocalCluster, tmp_path: Path, shown: str) -> None:
    (tmp_path / "train_with_token.py").write_text("def train(config): ...\n")
    (tmp_path / "job.yaml").write_text(_JOB)
    settings = {
        "none": {},
        "no file": {"RAY_AUTH_MODE": "token"},
        "another one": {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "ab" * 32},
    }[shown]
    job = ["run", str(tmp_path / "job.yaml"), "--run-id", "refused", "--storage", str(tmp_path / "runs")]
    refused = _python(
        "-m", "elastic_jobs.cli", *job, "--address", guarded.address, environment=_environment(tmp_path, **settings)
    )
    assert refused.returncode == 2
    told = [line for line in refused.stderr.splitlines() if line.startswith("elastic run: ")]
    assert len(told) == 1
    assert "asks for a token, and yours is missing or not the right one: set RAY_AUTH_MODE=token" in told[0]
    assert refused.stdout == ""
    assert "Traceback" not in refused.stderr
    # Nothing is left that would stand in the way of the next try.
    assert not (tmp_path / "runs" / "refused" / "job.json").exists()


def test_a_run_whose_cluster_refuses_the_token_is_not_taken_to_be_over(guarded: LocalCluster, tmp_path: Path) -> None:
    (tmp_path / "train_with_token.py").write_text("def train(config): ...\n")
    (tmp_path / "job.yaml").write_text(_JOB)
    folder = RunFolder(str(tmp_path / "runs"), "kept")
    settings = load_job(tmp_path / "job.yaml").settings("kept", folder.url)
    entry = {"entry_point": "train_with_token:train", "folder": str(tmp_path)}
    folder.write("job.json", {"settings": settings.to_json(), **entry})
    write_live(folder, Live(guarded.address))
    before = sorted(tmp_path.rglob("*"))
    environment = _environment(tmp_path, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="ab" * 32)
    words = ("resume", "kept", "--storage", folder.url)
    unknown = _python("-m", "elastic_jobs.cli", *words, "--job", str(tmp_path / "job.yaml"), environment=environment)
    assert (unknown.returncode, "would get this machine's Ray token" in unknown.stderr) == (2, True), unknown.stderr
    refused = _python("-m", "elastic_jobs.cli", *words, "--trust-storage", environment=environment)
    assert refused.returncode == 2, refused.stderr
    (told,) = [line for line in refused.stderr.splitlines() if line.startswith("elastic resume: ")]
    assert f"run 'kept' cannot be reached at {guarded.address}: the Ray cluster at" in told
    assert "asks for a token, and yours is missing or not the right one" in told
    assert [path for path in sorted(tmp_path.rglob("*")) if "__pycache__" not in str(path)] == before
