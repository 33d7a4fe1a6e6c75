"""Which TCP sockets of this process belong to a generation's groups, and how to shut them down.

gloo has no call that releases a thread blocked in a collective with a frozen peer. Shutting down the connected sockets
under it does, within milliseconds (measured; aborting, closing or destroying the group does not). Other sockets of the
process (Ray's) must not be touched, and listening sockets must never be shut down: gloo's accept thread would then
abort the process.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

Address = tuple[str, int]


@dataclass(frozen=True)
class TcpSocket:
    """`inode` distinguishes a descriptor number that was closed and reused. `peer` is None when the socket is not
    connected."""

    fd: int
    inode: str
    listening: bool
    local: Address
    peer: Address | None


def tcp_sockets() -> list[TcpSocket]:
    """Every TCP socket of this process at this moment. Safe while other threads open and close descriptors."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        info = _look(int(name))
        if info is not None:
            found.append(info)
    return found


def shut_down(target: TcpSocket, both: bool) -> bool:
    """Shut down a connected socket for reading, or in both directions; False when it is gone or is no longer the same
    one.

    For reading first: a peer's "ready to receive" may lie unread in it. gloo answers by sending, and where it cannot,
    it puts the operation aside and never tells whoever waits for it that the connection has ended (as of torch 2.13,
    see `held_waits`).
    """
    duplicate = _duplicate(target.fd, target.inode)
    if duplicate is None:
        return False
    with duplicate:
        try:
            duplicate.shutdown(socket.SHUT_RDWR if both else socket.SHUT_RD)
        except OSError:
            # Already closed by the other side.
            return False
    return True


def _look(fd: int) -> TcpSocket | None:
    inode = inode_of(fd)
    if inode is None:
        return None
    duplicate = _duplicate(fd, inode)
    if duplicate is None:
        return None
    with duplicate:
        if duplicate.family not in (socket.AF_INET, socket.AF_INET6) or duplicate.type != socket.SOCK_STREAM:
            return None
        try:
            listening = bool(duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
            local = _address(duplicate.getsockname())
        except OSError:
            return None
        try:
            peer = _address(duplicate.getpeername())
        except OSError:
            peer = None
    return TcpSocket(fd, inode, listening, local, peer)


def inode_of(fd: int) -> str | None:
    """The socket that the descriptor refers to ("socket:[inode]"); None for anything else."""
    try:
        target = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return None
    return target if target.startswith("socket:") else None


def _duplicate(fd: int, inode: str) -> socket.socket | None:
    """A duplicate of the descriptor, checked to be the same socket: another thread may close and reuse the number."""
    try:
        copy = os.dup(fd)
    except OSError:
        return None
    if inode_of(copy) != inode:
        os.close(copy)
        return None
    return socket.socket(fileno=copy)


def _address(name: tuple[str, int] | tuple[str, int, int, int]) -> Address:
    host = str(name[0])
    return host.removeprefix("::ffff:"), int(name[1])
