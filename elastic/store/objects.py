"""Named byte strings in storage: the few operations that checkpoints and journals need of a storage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

Chunk = bytes | bytearray | memoryview
TIMEOUT_S = 300.0


class Objects(Protocol):
    """Paths are relative, with "/" between parts. Every method may be called from any thread.

    Raises IntegrityError where an object is missing or too short, or a path leads out of the storage; UsageError where
    the address or the permissions must be changed; and StorageError for all else. Transient network errors have been
    retried by then.
    """

    def put(self, path: str, chunks: Iterable[Chunk]) -> None:
        """Write an object, or replace it. It is durable when this returns; a reader sees all of it or none, also when
        `chunks` raises. Chunks must not change until then. Remains of a killed process are listed by `sizes`."""
        ...

    def create(self, path: str, data: bytes) -> None:
        """As `put`, but raises IntegrityError when the object exists with other content. On stores without a
        conditional write, two callers at the same moment may both succeed."""
        ...

    def get(self, path: str) -> bytes: ...

    def read_into(self, path: str, begin: int, views: Sequence[memoryview]) -> None:
        """Fill the views, one after the other, with the bytes from `begin` on."""
        ...

    def read_parts(self, path: str, parts: Iterable[tuple[int, Sequence[memoryview]]]) -> None:
        """`read_into` of one object for each (begin, views)."""
        ...

    def names(self, folder: str) -> list[str]:
        """The names directly below a folder, of objects and of folders, sorted; empty when there is no such folder."""
        ...

    def sizes(self, folder: str, *, unfinished: bool = False) -> dict[str, int]:
        """Path and size in bytes of every object below a folder; empty when there is no such folder.

        With `unfinished` also the remains of killed writes, under names that `remove` understands.
        """
        ...

    def remove(self, paths: Sequence[str]) -> None:
        """Remove objects, and folders left empty. What does not exist is not an error."""
        ...
