"""S3 for tests: moto's server as a child process, and a proxy before it that fails as the real service does."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

CHILD = Path(__file__).with_name("s3_child.py")
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test-access",
    "AWS_SECRET_ACCESS_KEY": "test-secret-of-storage",
    "AWS_DEFAULT_REGION": "us-east-1",
    # Nobody may be asked for a machine's role, and no file of the user's is to be read.
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
}


@contextlib.contextmanager
def s3_port(command: Sequence[str] = (sys.executable, str(CHILD))) -> Iterator[int]:
    """The port of a server that is up."""
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        yield int(child.stdout.readline())
    finally:
        child.stdin.close()
        child.stdout.close()
        child.wait(30)


def use(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Send this process's requests there, by the standard environment variables."""
    import s3fs

    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": endpoint}.items():
        monkeypatch.setenv(name, value)
    # fsspec keeps what it has connected, and asks the environment no more: a server of an earlier test, for example.
    s3fs.S3FileSystem.clear_instance_cache()


def make_bucket(name: str) -> None:
    import s3fs

    s3fs.S3FileSystem().call_s3("create_bucket", Bucket=name)
