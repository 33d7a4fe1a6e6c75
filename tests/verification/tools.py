"""What mutations are made of: one function of ours changed for a while, or a source that lies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

from verification.model import Setup

Change = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Mutation:
    """One bug. `saving`, `restoring`: what is changed meanwhile; `reading` makes one rank's source.

    `before_save(world)` and `before_restore(world)` change engines instead of code.
    """

    id: str
    what: str
    setup: Setup
    worlds: tuple[int, int]
    saving: Change = nullcontext
    restoring: Change = nullcontext
    reading: Callable[[Reading], Any] | None = None
    before_save: Callable[[Any], None] | None = None
    before_restore: Callable[[Any], None] | None = None

    def __str__(self) -> str:
        return f"{self.id} {self.what}"


@dataclass(frozen=True)
class Reading:
    """Where the rank `rank` of the new world reads: `store`, and `older`, a store with the checkpoint of another step
    that was saved at the new world size."""

    rank: int
    store: Any
    older: Any
    older_id: str


def changed(owner: Any, name: str, around: Callable[..., Any]) -> Change:
    """`owner.name(...)` becomes `around(original, ...)`."""
    original = getattr(owner, name)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    return lambda: mock.patch.object(owner, name, replacement)


def together(*changes: Change) -> Change:
    @contextmanager
    def all_of_them() -> Iterator[None]:
        if not changes:
            yield
            return
        with changes[0](), together(*changes[1:])():
            yield

    return all_of_them


class Lying:
    """A source that reads what it was asked for and then changes it, or is asked for something else."""

    name = "storage"

    def __init__(
        self,
        store: Any,
        ask: Callable[[Any], Any] = lambda wanted: wanted,
        then: Callable[[Any, Any], None] = lambda manifest, wanted: None,
    ) -> None:
        self._store, self._ask, self._then = store, ask, then

    def manifest(self, checkpoint_id: str) -> Any:
        return self._store.manifest(checkpoint_id)

    def read(self, manifest: Any, ranges: Sequence[Any]) -> Any:
        count = self._store.read(manifest, [self._ask(wanted) for wanted in ranges])
        for wanted in ranges:
            self._then(manifest, wanted)
        return count


def modules() -> Any:
    """Our modules that are changed, by their own names; imported when asked for."""
    from elastic.core.checkpoint import assembly
    from elastic.core.sharding import reshard
    from elastic.engines import inventory
    from elastic.engines.deepspeed import adapter, extra_state
    from elastic.engines.deepspeed.state import partitioned, stage3, zero
    from elastic.training.state import engine_state, reading, restore

    found = (
        adapter,
        assembly,
        reshard,
        extra_state,
        engine_state,
        inventory,
        partitioned,
        reading,
        restore,
        stage3,
        zero,
    )
    from elastic.training.state import extra_state as generic_extra_state

    return SimpleNamespace(
        generic_extra_state=generic_extra_state, **{module.__name__.rsplit(".", 1)[1]: module for module in found}
    )
