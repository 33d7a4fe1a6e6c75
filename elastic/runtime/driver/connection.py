"""Join a Ray cluster as a driver, and leave it: in bounded time, with any failure as one sentence.

By itself `ray.init` tries a port without a listener for 13 minutes, and a wrong token for 20 s (measured, 2.60). Ray
ends a driver whose cluster is gone after a minute, with Ray's exit code, or lets it hang at its exit.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator

import ray

from elastic.core.errors import NobodyAnswers, TokenRefused, UsageError
from elastic.runtime import names

# The limit of one connection attempt; a wrong address that drops packets costs this once.
_TRY_S = 3.0
_PAUSE_S = 0.5
_LEAVE_LIMIT_S = 5.0
# Ray's own settings, read when a driver connects; values from the environment are kept.
_PATIENCE = {
    # Tries of 40 s each to reach a control store that accepts connections. Only the first one matters.
    "RAY_gcs_server_port_wait_time_s": "1",
    # Ray ends a driver after this time without a control store. The head may be restarted much later; how long a run
    # may be unreachable is decided in `client.RayRunHandle`.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "86400",
}


def connect(address: str | None, *, show_prints: bool = False, wait_s: float = 0.0) -> None:
    """Join the cluster at `address` (None: Ray's own rules). A restarting head is waited for, up to `wait_s`.

    Raises NobodyAnswers, TokenRefused, or UsageError if it is not a Ray cluster of this version.
    """
    if ray.is_initialized():
        return
    if address is not None:
        _await_listener(address, wait_s)
    try:
        with _environment():
            ray.init(address=address, namespace=names.NAMESPACE, log_to_driver=show_prints, logging_level=logging.ERROR)
    except (ConnectionError, ray.exceptions.RayError, RuntimeError, ValueError) as error:
        kind = TokenRefused if _refused(_whole_text(error)) else UsageError
        raise kind(_sentence(address, error)) from error


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Ray reads its settings when it connects. Child processes, a cluster for example, must not inherit them."""
    made = {name: value for name, value in _PATIENCE.items() if name not in os.environ}
    os.environ.update(made)
    try:
        yield
    finally:
        for name in made:
            del os.environ[name]


def disconnect(limit_s: float = _LEAVE_LIMIT_S) -> bool:
    """Leave the cluster. False if Ray still waits for a cluster that is gone, as it would at the exit of the
    process."""
    leaving = threading.Thread(target=ray.shutdown, name="elastic-leave", daemon=True)
    leaving.start()
    leaving.join(limit_s)
    return not leaving.is_alive()


def _await_listener(address: str, wait_s: float) -> None:
    """Wait until `address` accepts connections, if it has the form host:port."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "://" in address:
        return
    deadline = time.monotonic() + wait_s
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_TRY_S).close()
            return
        except (OSError, OverflowError) as error:
            if time.monotonic() + _PAUSE_S > deadline:
                waited = f" for {wait_s:.0f} s" if wait_s else ""
                why = getattr(error, "strerror", None) or str(error)
                raise NobodyAnswers(
                    f"no Ray cluster answers at {address!r}{waited} ({why}); check the address, and that its head runs"
                ) from error
            time.sleep(_PAUSE_S)


def _sentence(address: str | None, error: BaseException) -> str:
    where = "that Ray finds by itself" if address is None else f"at {address!r}"
    text = _whole_text(error)
    if _refused(text):
        return (
            f"the Ray cluster {where} asks for a token, and yours is missing or not the right one: "
            "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to a file with the cluster's token"
        )
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if "version mismatch" in text.lower():
        return f"the Ray cluster {where} is of another version than this machine's Ray: {' '.join(str(error).split())}"
    return f"no Ray cluster {where} can be joined: {first}"


def _refused(text: str) -> bool:
    return "AuthenticationError" in text or "Unauthenticated" in text


def _whole_text(error: BaseException | None) -> str:
    """The text of the error and of its causes: Ray hides the relevant cause behind a ConnectionError."""
    found = []
    while error is not None:
        found.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or error.__context__
    return "\n".join(found)
