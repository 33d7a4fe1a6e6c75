"""`elastic run` with storage that cannot work: one clear sentence, exit 2, and nothing half-started."""

from __future__ import annotations

import logging
import socket
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from elastic_jobs import cli
from s3_proxy import Proxy, Trouble
from s3_server import CREDENTIALS

from elastic.store.open import open_objects

JOB = """
entry_point: refused_train.py:main
max_workers: 2
max_steps: 10
config: {width: 8}
"""


class NothingStarts:
    """The backend of a command that is refused: whatever it is asked for is a failure of the test."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for, though the storage cannot be used")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    (tmp_path / "refused_train.py").write_text("def main(config): ...\n")
    (tmp_path / "job.yaml").write_text(JOB)
    yield tmp_path / "job.yaml"
    sys.modules.pop("refused_train", None)


def refused(capsys: pytest.CaptureFixture[str], storage: str, *more: str) -> str:
    """The sentence, seen to be one, and the exit code 2."""
    backend: Any = NothingStarts()
    assert cli.main(["run", "job.yaml", "--run-id", "r1", "--storage", storage, *more], backend) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("elastic run: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err


def test_no_right_to_write(job: Path, url: str, proxy: Proxy, capsys: pytest.CaptureFixture[str]) -> None:
    proxy.decide = lambda request: Trouble.DENIED if request.method in ("PUT", "POST") else None
    assert "storage does not allow access to" in refused(capsys, url)
    assert open_objects(url).sizes("") == {}


def test_no_right_to_remove(job: Path, url: str, proxy: Proxy, capsys: pytest.CaptureFixture[str]) -> None:
    proxy.decide = lambda request: Trouble.DENIED if request.operation == "DeleteObjects" else None
    assert "storage does not allow access to" in refused(capsys, url)


def test_no_bucket(job: Path, proxy: Proxy, capsys: pytest.CaptureFixture[str]) -> None:
    assert "storage has no such bucket" in refused(capsys, f"s3://no-such-{uuid.uuid4().hex[:8]}/runs")


def test_no_server(
    job: Path, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        forget_file_systems()
        sentence = refused(capsys, "s3://bucket/runs")
    forget_file_systems()
    assert "Could not connect to the endpoint URL" in sentence
    assert "nothing was started" in sentence


def forget_file_systems() -> None:
    """One that has been used keeps its connections, its endpoint and its credentials."""
    from s3fs import S3FileSystem

    S3FileSystem.clear_instance_cache()


def test_no_answer(
    job: Path, url: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("elastic_jobs.job_file.checks._CHECK_TIMEOUT_S", 0.5)
    proxy.decide = lambda request: Trouble.STALL
    assert "it did not answer in time; nothing was started" in refused(capsys, url)


def test_no_driver(
    job: Path, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"].__dict__["_registry"], "s3", raising=False)
    assert "its driver is not installed; install ray-elastic[s3]" in refused(capsys, "s3://bucket/runs")


def test_credentials_in_the_address(job: Path, proxy: Proxy, capsys: pytest.CaptureFixture[str]) -> None:
    sentence = refused(capsys, "s3://me:s3cr3t-of-mine@bucket/runs")
    assert "s3://***@bucket/runs holds credentials" in sentence
    assert "s3cr3t" not in sentence
    assert proxy.seen == []


@pytest.mark.parametrize("key", ["storage_url", "checkpoint: {url"])
def test_credentials_in_the_job_file(job: Path, capsys: pytest.CaptureFixture[str], key: str) -> None:
    job.write_text(f"{JOB}{key}: 's3://me:s3cr3t-of-mine@bucket/runs'{'}' if '{' in key else ''}\n")
    backend: Any = NothingStarts()
    assert cli.main(["run", "job.yaml"], backend) == 2
    assert "s3cr3t" not in capsys.readouterr().err


def test_a_secret_in_the_config(job: Path, url: str, proxy: Proxy, capsys: pytest.CaptureFixture[str]) -> None:
    job.write_text(JOB.replace("{width: 8}", "{hub: {api_key: s3cr3t-of-mine}}"))
    sentence = refused(capsys, url)
    assert "config.hub.api_key looks like a secret" in sentence
    assert "s3cr3t" not in sentence
    assert proxy.seen == []


def test_a_folder_that_cannot_be_written(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (job.parent / "file").write_text("in the way")
    assert "storage does not allow access to" in refused(capsys, str(job.parent / "file" / "runs"))
    assert "Not a directory" in refused(capsys, str(job.parent / "file"))


def test_checkpoints_elsewhere_are_tried_too(job: Path, url: str, proxy: Proxy, capsys: Any) -> None:
    job.write_text(f"{JOB}checkpoint: {{url: 's3://no-such-{uuid.uuid4().hex[:8]}/x'}}\n")
    assert "storage has no such bucket" in refused(capsys, url)
    assert open_objects(url).sizes("") == {}


def test_what_drivers_log_is_not_shown(
    job: Path, url: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Their debug lines hold the headers of requests, session tokens among them."""
    monkeypatch.setenv("AWS_SESSION_TOKEN", "session-s3cr3t")
    forget_file_systems()
    proxy.decide = lambda request: Trouble.DENIED if request.method == "PUT" else None
    backend: Any = NothingStarts()
    with caplog.at_level(logging.DEBUG):
        assert cli.main(["--verbose", "run", "job.yaml", "--storage", url], backend) == 2
    assert any("x-amz-security-token" in request.headers for request in proxy.seen)
    assert "session-s3cr3t" not in caplog.text
    assert CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in caplog.text
    forget_file_systems()
