"""The store through which a generation's members form their groups, hosted by the process that will be rank 0."""

from __future__ import annotations

import errno
import logging
import socket
import threading
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore

from elastic.core.generation_spec import Rendezvous

logger = logging.getLogger(__name__)

_CHECK_EVERY_S = 0.05


_hosted: dict[Rendezvous, TCPStore] = {}
_hosted_lock = threading.Lock()


def host_store(host: str, port: int = 0) -> Rendezvous:
    """Start a store in this process (the one that will be rank 0); `host` is how others reach it, port 0 a free one.

    It listens at that address only, and stays open until the generation that uses it is left, or `release_store`.
    """
    listener = _listen(host, port)
    if listener is None:
        store = TCPStore(host, port, is_master=True, wait_for_workers=False)
    else:
        port = listener.getsockname()[1]
        # The store closes the descriptor.
        store = TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )  # fmt: skip
    rendezvous = Rendezvous(host, store.port)
    with _hosted_lock:
        _hosted[rendezvous] = store
    return rendezvous


def _listen(host: str, port: int) -> socket.socket | None:
    """torch would listen at every address of the machine, without authentication. None where `host` is an address that
    is forwarded to this machine and not its own."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    try:
        return socket.create_server(address, family=family)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        logger.warning("%s is not an address of this machine: the process group's store listens at all addresses", host)
        return None


def release_store(rendezvous: Rendezvous) -> None:
    """Close a store that this process hosts. Does nothing when it hosts no such store."""
    with _hosted_lock:
        _hosted.pop(rendezvous, None)


def connect(rendezvous: Rendezvous, timeout_s: float, check: Callable[[], None]) -> Store:
    """Reach the store. `check` is called while waiting and may raise; otherwise raises torch's DistError in the end.

    The connection is made on a thread of its own: it cannot be interrupted, and an abort must not wait for a lost host.
    """
    attempt = _Attempt(rendezvous, timeout_s)
    while not attempt.done.wait(_CHECK_EVERY_S):
        check()
    return attempt.store()


def await_all(store: Store, name: str, ranks: int) -> None:
    """Return when so many `ranks` have called this with the same `name`. Collective over the store.

    Raises torch's DistError when the store's timeout is over, or when its connection is shut down by an abort.
    """
    if store.add(f"{name}/count", 1) == ranks:
        store.set(f"{name}/all", "")
    store.wait([f"{name}/all"])


class _Attempt:
    """Reaches the store in the background; gives up after `timeout_s`."""

    def __init__(self, rendezvous: Rendezvous, timeout_s: float) -> None:
        self.done = threading.Event()
        self._outcome: Store | BaseException | None = None
        threading.Thread(target=self._run, args=(rendezvous, timeout_s), name="elastic-connect", daemon=True).start()

    def store(self) -> Store:
        """Once `done`. Raises what connecting raised (a DistError of torch's)."""
        assert self._outcome is not None
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome

    def _run(self, rendezvous: Rendezvous, timeout_s: float) -> None:
        try:
            # The store looks up the name of every client (reverse DNS, one after another): a resolver that drops a
            # query costs 5 s here unless RES_OPTIONS says otherwise.
            self._outcome = TCPStore(
                rendezvous.host,
                rendezvous.port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s),
            )
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits for it
            self._outcome = error
        finally:
            self.done.set()
