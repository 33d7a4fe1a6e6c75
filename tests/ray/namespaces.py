"""Machines that can be cut from each other: a network namespace per node, and one between them that routes.

Processes, files and memory are those of this machine; only the network is each node's own. A cut is made in the router
and drops packets without a word, as a dead switch does; a link that is down is noticed by its node at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import permutations
from pathlib import Path

from elastic_cluster.local import processes

# Of every namespace, and of the folder that belongs to its owner: whoever holds the lock in it is alive.
PREFIX = "elp-"
LINK = "eth0"
_ROOT = Path("/tmp")  # Ray's socket paths leave no room for a longer one.
_NAMED = Path("/run/netns")
_COMMAND_LIMIT_S = 20.0
_KILL_LIMIT_S = 20.0


def why_not() -> str:
    """Why there can be no namespaces here, as a reason to skip; "" where there can. Tries it once."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the command `ip` (iproute2)"
    try:
        with Network.made(2) as network:
            network.cut(0, 1)
            network.heal(0, 1)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return f"network namespaces are not permitted here: {said.strip().splitlines()[-1]}"
    return ""


class Network:
    """`count` nodes, each at `address(i)` in the namespace `name(i)` and reaching the others through the router."""

    def __init__(self, folder: Path, count: int) -> None:
        """Use `made`."""
        self.folder = folder
        self.count = count
        self._cut: dict[tuple[int, int], int] = {}
        self._router = f"{folder.name}-r"

    @classmethod
    @contextlib.contextmanager
    def made(cls, count: int) -> Iterator[Network]:
        """Gone in the end with every process in it and with its folder; what a killed owner has left goes first."""
        clear_remains()
        made = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=_ROOT))
        with _locked(made):
            # Under this name only when it is locked: nobody else may take it for what a dead owner has left.
            folder = made.rename(_ROOT / made.name[1:])
            try:
                network = cls(folder, count)
                network._build()
                yield network
            finally:
                _clear(folder)

    def name(self, node: int) -> str:
        return f"{self.folder.name}-{node}"

    def address(self, node: int) -> str:
        return f"10.78.{node}.1"

    def inside(self, node: int, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` in the node's network."""
        return ["ip", "netns", "exec", self.name(node), *command]

    def members(self, node: int) -> list[processes.Process]:
        """Every process in the node's network; there is no other way to tell it from those of other nodes."""
        return _members([self.name(node)])

    def end_processes(self, node: int) -> None:
        processes.kill_all(lambda: self.members(node), lambda: None, _KILL_LIMIT_S)

    # --- faults ---

    def cut(self, *nodes: int) -> None:
        """None of these nodes reaches any other of them any more; nobody is told. Cuts that are there stay."""
        self._rules("add", [pair for pair in permutations(nodes, 2) if pair not in self._cut])

    def cut_one_way(self, sender: int, receiver: int) -> None:
        """Nothing that `sender` sends arrives at `receiver`; the other way is open."""
        self._rules("add", [(sender, receiver)])

    def heal(self, *nodes: int) -> None:
        """The cuts between these nodes are over."""
        self._rules("del", [pair for pair in permutations(nodes, 2) if pair in self._cut])

    def isolate(self, node: int) -> None:
        """Cut the node from all others."""
        self._rules("add", [pair for pair in self._pairs_of(node) if pair not in self._cut])

    def heal_all(self) -> None:
        self._rules("del", list(self._cut))
        for node in range(self.count):
            self.link_up(node)

    def link_down(self, node: int) -> None:
        """The node's own link goes down, and with it its routes: it is told so at once."""
        _ip(["link", "set", LINK, "down"], self.name(node))

    def link_up(self, node: int) -> None:
        _ip(["link", "set", LINK, "up"], self.name(node))
        # Not kept by the kernel while the link was down.
        _ip(["route", "replace", "default", "via", self._gateway(node)], self.name(node))

    # --- inside ---

    def _build(self) -> None:
        _ip(["netns", "add", self._router])
        for node in range(self.count):
            _ip(["netns", "add", self.name(node)])
            port = ["name", f"n{node}", "type", "veth", "peer", "name", LINK, "netns", self.name(node)]
            _ip(["link", "add", *port], self._router)
            self._up(self._router, f"n{node}", self._gateway(node))
            _ip(["link", "set", "lo", "up"], self.name(node))
            self._up(self.name(node), LINK, self.address(node))
            _ip(["route", "add", "default", "via", self._gateway(node)], self.name(node))
        _ip(["netns", "exec", self._router, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"])

    def _up(self, namespace: str, link: str, address: str) -> None:
        _ip(["address", "add", f"{address}/24", "dev", link], namespace)
        _ip(["link", "set", link, "up"], namespace)

    def _gateway(self, node: int) -> str:
        return f"10.78.{node}.254"

    def _pairs_of(self, node: int) -> list[tuple[int, int]]:
        return [pair for pair in permutations(range(self.count), 2) if node in pair]

    def _rules(self, do: str, pairs: Iterable[tuple[int, int]]) -> None:
        """All in one command: a cut that is made one way after the other would be something else for a while."""
        lines = []
        for a, b in pairs:
            preference = 1000 + a * self.count + b
            lines.append(f"rule {do} pref {preference} from {self.address(a)} to {self.address(b)} blackhole")
            if do == "add":
                self._cut[a, b] = preference
            else:
                del self._cut[a, b]
        _ip(["-batch", "-"], self._router, "\n".join(lines))


def clear_remains() -> None:
    """End the processes and remove the namespaces and folders whose owner is dead."""
    known = {path.name.rpartition("-")[0] for path in _NAMED.glob(f"{PREFIX}*")}
    known |= {path.name for path in _ROOT.glob(f"{PREFIX}*")}
    for name in known:
        folder = _ROOT / name
        folder.mkdir(exist_ok=True)
        with contextlib.suppress(BlockingIOError, FileNotFoundError), _locked(folder):
            _clear(folder)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """BlockingIOError where the owner of the folder is alive: the kernel gives up its lock when it ends."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _clear(folder: Path) -> None:
    names = [path.name for path in _NAMED.glob(f"{folder.name}-*")]
    try:
        processes.kill_all(lambda: _members(names), lambda: None, _KILL_LIMIT_S)
    finally:
        for name in names:
            _ip(["netns", "delete", name])
        shutil.rmtree(folder, ignore_errors=True)


def _members(names: Iterable[str]) -> list[processes.Process]:
    """The living processes in these namespaces."""
    spaces = set()
    for name in names:
        with contextlib.suppress(OSError):
            spaces.add((_NAMED / name).stat().st_ino)
    found = []
    for process in processes.table().values():
        with contextlib.suppress(OSError):
            if not process.zombie and os.stat(f"/proc/{process.pid}/ns/net").st_ino in spaces:
                found.append(process)
    return found


def _ip(arguments: Sequence[str], namespace: str | None = None, given: str | None = None) -> None:
    """Raises CalledProcessError, with what `ip` has said."""
    where = [] if namespace is None else ["-n", namespace]
    subprocess.run(
        ["ip", *where, *arguments], input=given, check=True, capture_output=True, text=True, timeout=_COMMAND_LIMIT_S
    )
