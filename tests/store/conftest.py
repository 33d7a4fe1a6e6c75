"""Storage over real HTTP: an S3 server in a process of its own, and a proxy that fails. No Ray and no training."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
import s3_proxy
import s3_server

from elastic.store.objects import Objects
from elastic.store.open import open_objects


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic.store.remote._FIRST_PAUSE_S", 0.001)


@pytest.fixture(scope="session")
def server_port() -> Iterator[int]:
    with s3_server.s3_port() as port:
        yield port


@pytest.fixture(scope="session")
def session_proxy(server_port: int) -> Iterator[s3_proxy.Proxy]:
    with s3_proxy.proxy_of(server_port) as proxy:
        yield proxy


@pytest.fixture
def proxy(session_proxy: s3_proxy.Proxy, monkeypatch: pytest.MonkeyPatch) -> s3_proxy.Proxy:
    """All requests of this process go through it; nothing fails until the test says so."""
    s3_server.use(monkeypatch, session_proxy.endpoint)
    session_proxy.decide = s3_proxy.fine
    session_proxy.seen.clear()
    return session_proxy


@pytest.fixture
def bucket(proxy: s3_proxy.Proxy) -> str:
    """An empty bucket of its own."""
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    s3_server.make_bucket(name)
    proxy.seen.clear()
    return name


@pytest.fixture
def url(bucket: str) -> str:
    return f"s3://{bucket}/runs"


@pytest.fixture
def objects(url: str) -> Objects:
    return open_objects(url, 60.0)
