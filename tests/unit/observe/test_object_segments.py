"""A journal in an object store: many small objects are joined, and no order of failures loses or doubles a line."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.errors import Fenced, IntegrityError, StorageError
from elastic.observe.object_segments import ObjectSegments
from elastic.store.objects import Chunk, Objects
from elastic.store.open import open_objects


class Doubtful:
    """Objects whose puts may fail before or after they have happened, or happen later."""

    def __init__(self, inner: Objects) -> None:
        self.inner = inner
        self.fates: list[str] = []
        self.late: list[tuple[str, list[bytes]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def put(self, path: str, chunks: Iterable[Chunk]) -> None:
        fate, data = self.fates.pop(0) if self.fates else "good", [bytes(chunk) for chunk in chunks]
        if fate in ("good", "unsaid"):
            self.inner.put(path, data)
        if fate == "late":
            self.late.append((path, data))
        if fate != "good":
            raise StorageError("no answer")

    def arrive(self) -> None:
        """What was on its way is there now."""
        for path, data in self.late:
            self.inner.put(path, data)
        self.late.clear()


FATES = st.sampled_from(["good", "good", "good", "lost", "unsaid", "late", "arrive"])


@given(fates=st.lists(FATES, max_size=40), joined=st.integers(1, 5))
def test_every_line_once_and_in_order(fates: list[str], joined: int) -> None:
    objects = Doubtful(open_objects(f"memory://{uuid.uuid4().hex}"))
    writer, reader = ObjectSegments(objects, "j", joined), ObjectSegments(objects, "j")
    writer.claim(1)
    accepted: list[str] = []
    waiting: list[str] = []
    for number, fate in enumerate(fates):
        if fate == "arrive":
            objects.arrive()
            continue
        waiting.append(f"{number}\n")
        objects.fates = [fate]
        try:
            writer.append(1, "".join(waiting))
        except StorageError:
            pass
        else:
            accepted += waiting
            waiting.clear()
        # What was not confirmed may be there, in part, and nothing else may.
        found = list(reader.lines(1))
        assert found[: len(accepted)] == accepted
        assert (accepted + waiting)[: len(found)] == found
    objects.fates = []
    objects.arrive()
    if waiting:
        writer.append(1, "".join(waiting))
    objects.arrive()
    for looking in (reader, ObjectSegments(objects, "j")):
        assert list(looking.lines(1)) == accepted + waiting


def test_a_long_journal_is_few_objects() -> None:
    objects = open_objects(f"memory://{uuid.uuid4().hex}")
    segments = ObjectSegments(objects, "j", joined=10)
    segments.claim(1)
    for number in range(105):
        segments.append(1, f"{number}\n")
    kept = [name for name in objects.names("j/000001") if not name.startswith("claim-")]
    assert len(kept) == 1 + 10 + 5
    assert "00000011-00000020.jsonl" in kept
    assert list(ObjectSegments(objects, "j").lines(1)) == [f"{number}\n" for number in range(105)]


def test_a_reader_that_listed_before_the_joining_looks_again() -> None:
    objects = open_objects(f"memory://{uuid.uuid4().hex}")
    segments, reader = ObjectSegments(objects, "j", joined=3), ObjectSegments(objects, "j")
    segments.claim(1)
    segments.append(1, "1\n")
    segments.append(1, "2\n")
    fetch, times = reader._fetch, [0]

    def joined_meanwhile(paths: Any) -> None:
        times[0] += 1
        if times[0] == 1:
            segments.append(1, "3\n")
        fetch(paths)

    reader._fetch = joined_meanwhile  # type: ignore[method-assign]
    assert list(reader.lines(1)) == ["1\n", "2\n", "3\n"]
    assert times == [2]


def test_a_journal_that_cannot_be_joined_is_still_written() -> None:
    objects = Doubtful(open_objects(f"memory://{uuid.uuid4().hex}"))
    segments = ObjectSegments(objects, "j", joined=2)
    segments.claim(1)
    segments.append(1, "1\n")
    objects.fates = ["good", "lost"]
    segments.append(1, "2\n")
    assert "00000002.jsonl" in objects.names("j/000001")
    segments.append(1, "3\n")
    assert "00000001-00000003.jsonl" in objects.names("j/000001")
    assert list(ObjectSegments(objects, "j").lines(1)) == ["1\n", "2\n", "3\n"]


def test_an_object_that_is_listed_and_cannot_be_read_is_said() -> None:
    objects = open_objects(f"memory://{uuid.uuid4().hex}")
    segments = ObjectSegments(objects, "j")
    segments.claim(1)
    segments.append(1, "1\n")

    def missing(path: str) -> bytes:
        raise IntegrityError(f"{path} is missing in storage")

    objects.get = missing  # type: ignore[method-assign]
    with pytest.raises(IntegrityError, match="is missing in storage"):
        list(ObjectSegments(objects, "j").lines(1))


def test_who_sees_another_claimant_gives_way() -> None:
    """As on a store that heeds no conditions: the second claim is made while the first is under way."""
    objects = open_objects(f"memory://{uuid.uuid4().hex}")
    create = objects.create

    def both(path: str, data: bytes) -> None:
        create(path, data)
        objects.put(f"j/000001/claim-{'0' * 32}", [])

    objects.create = both  # type: ignore[method-assign]
    with pytest.raises(Fenced, match="incarnation 1"):
        ObjectSegments(objects, "j").claim(1)
