"""What a driver is told when it cannot join a cluster, and how long that takes."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable

import pytest

from elastic.core.errors import TokenRefused, UsageError
from elastic.runtime.driver import connection


@pytest.fixture
def dead_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that Ray was asked to join."""
    asked: list[str] = []
    monkeypatch.setattr(connection.ray, "init", lambda address, **_: asked.append(address))
    return asked


def test_where_nobody_listens_ray_is_not_asked_at_all(dead_port: int, joined: list[str]) -> None:
    with pytest.raises(UsageError, match=rf"no Ray cluster answers at '127.0.0.1:{dead_port}' \(Connection refused\)"):
        connection.connect(f"127.0.0.1:{dead_port}")
    assert joined == []


def test_a_head_that_comes_back_in_time_is_waited_for(
    dead_port: int, joined: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    back: list[socket.socket] = []
    # Instead of a pause the head is restarted.
    monkeypatch.setattr(connection.time, "sleep", lambda _: back.append(socket.create_server(("127.0.0.1", dead_port))))
    connection.connect(f"127.0.0.1:{dead_port}", wait_s=20.0)
    assert joined == [f"127.0.0.1:{dead_port}"]
    back[0].close()


@pytest.mark.parametrize("address", ["auto", "ray://10.0.0.1:10001", "local"])
def test_other_forms_of_addresses_are_left_to_ray(address: str, joined: list[str]) -> None:
    connection.connect(address)
    assert joined == [address]


def test_rays_own_patience_is_changed_for_this_process_only(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = "RAY_gcs_rpc_server_reconnect_timeout_s"
    seen: list[str | None] = []
    monkeypatch.setattr(connection.ray, "init", lambda **_: seen.append(os.environ.get(setting)))
    monkeypatch.delenv(setting, raising=False)
    connection.connect("auto")
    assert setting not in os.environ, "a cluster that is started later would inherit it"
    monkeypatch.setenv(setting, "30")
    connection.connect("auto")
    assert seen == ["86400", "30"]


def test_a_port_that_is_none_is_an_address_where_nobody_answers(joined: list[str]) -> None:
    with pytest.raises(UsageError, match="no Ray cluster answers at 'localhost:99999'"):
        connection.connect("localhost:99999")


def _raise(error: Exception, cause: Exception | None = None) -> Callable[..., None]:
    def init(**_: object) -> None:
        raise error from cause

    return init


@pytest.mark.parametrize(
    ("error", "cause", "message"),
    [
        # As Ray 2.60 raises them: of a wrong token only the cause speaks.
        (
            ConnectionError("Failed to connect"),
            RuntimeError("Unauthenticated: RPC error"),
            "asks for a token, and yours",
        ),
        (
            RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.9"),
            None,
            "of another version .*2.9",
        ),
        (ConnectionError("Failed to connect\nand more"), None, "no Ray cluster at 'auto' can be joined: Failed to con"),
    ],
)
def test_why_ray_does_not_join_is_one_sentence(
    error: Exception, cause: Exception | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection.ray, "init", _raise(error, cause))
    with pytest.raises(UsageError, match=message) as raised:
        connection.connect("auto")
    assert "\n" not in str(raised.value)
    assert raised.value.exit_code == 2
    assert isinstance(raised.value, TokenRefused) is ("token" in message)


def test_a_cluster_that_is_gone_is_not_waited_for_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = threading.Event()
    monkeypatch.setattr(connection.ray, "shutdown", gone.wait)
    assert not connection.disconnect(limit_s=0.01)
    gone.set()
    assert connection.disconnect()
