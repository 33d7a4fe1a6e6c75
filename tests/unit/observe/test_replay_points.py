"""Replay points: a restart reads what follows the newest one that can be used, and nothing is lost by any of them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from elastic.core.errors import Fenced
from elastic.observe.journal import JournalReader, JournalWriter
from elastic.observe.journal_lines import to_line
from elastic.observe.open_segments import open_points
from elastic.store.open import open_objects


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path) if request.param == "file" else f"memory://journal-{uuid.uuid4().hex}"


def read(content: Mapping[str, Any]) -> int:
    return int(content["count"])


def opened(url: str) -> JournalWriter:
    return JournalWriter(url, "run", read_point=read)


def filled(url: str, count: int = 10, points: tuple[int, ...] = (4, 7)) -> JournalWriter:
    """A journal of records 1 to `count`, with a point after each of `points`."""
    writer = JournalWriter(url, "run")
    for number in range(1, count + 1):
        writer.append({"type": "a", "number": number})
        if number in points:
            writer.save_point({"count": number}, number, writer.mark())
    return writer


def numbers(writer: JournalWriter) -> list[int]:
    return [record["number"] for record in writer.replayed if record["type"] == "a"]


def names(url: str) -> list[str]:
    return open_objects(url).names("run/journal/points")


def damage(url: str, name: str) -> None:
    objects = open_objects(url)
    data = objects.get(f"run/journal/points/{name}")
    objects.put(f"run/journal/points/{name}", [data.replace(b'"count":', b'"count":1')])


def test_only_what_follows_the_newest_point_is_read(url: str) -> None:
    filled(url)
    after = opened(url)
    assert after.point is not None
    assert (after.point.content, numbers(after), after.problems) == (7, [8, 9, 10], ())


def test_numbers_and_counts_go_on_as_without_a_point(url: str) -> None:
    filled(url)
    after = opened(url)
    (begin,) = [r for r in JournalReader(url, "run").records() if r["type"] == "begin" and r["incarnation"] == 2]
    assert begin["read"] == {"1": 11}
    assert after.append({"type": "a", "number": 11})["seq"] == 13
    assert [r["seq"] for r in JournalReader(url, "run").records()] == list(range(1, 14))


def test_a_point_of_an_older_incarnation_is_followed_by_all_newer_segments(url: str) -> None:
    filled(url)
    second = opened(url)
    second.append({"type": "a", "number": 11})
    third = opened(url)
    third.append({"type": "a", "number": 12})
    third.save_point({"count": 12}, 1, third.mark())
    fourth = opened(url)
    assert (fourth.point and fourth.point.content, numbers(fourth)) == (12, [])
    (begin,) = [r for r in JournalReader(url, "run").records() if r["type"] == "begin" and r["incarnation"] == 4]
    assert begin["read"] == {"1": 11, "2": 2, "3": 2}


def test_a_point_may_cover_more_than_its_mark_says(url: str) -> None:
    """It is made while the last records are still on their way to storage."""
    writer = filled(url, 3, ())
    mark = writer.mark()
    writer.extend([{"type": "a", "number": number} for number in (4, 5, 6)])
    writer.save_point({"count": 5}, 5, mark)
    assert numbers(opened(url)) == [6]


def test_a_damaged_point_is_said_and_the_one_before_it_is_used(url: str) -> None:
    filled(url)
    damage(url, names(url)[-1])
    after = opened(url)
    assert (after.point and after.point.content, numbers(after)) == (4, [5, 6, 7, 8, 9, 10])
    (problem,) = after.problems
    assert "000001-000000000008.json of the journal cannot be used (ValueError: it is damaged)" in problem.sentence
    assert not problem.maybe_event


def test_without_a_usable_point_the_whole_journal_is_read(url: str) -> None:
    filled(url)
    for name in names(url):
        damage(url, name)
    after = opened(url)
    assert (after.point, numbers(after), len(after.problems)) == (None, list(range(1, 11)), 2)


def test_a_point_of_another_release_is_passed_over(url: str) -> None:
    writer = filled(url)
    writer.save_point({"amount": 10}, 10, writer.mark())
    after = opened(url)
    assert (after.point and after.point.content, numbers(after)) == (7, [8, 9, 10])


def test_a_point_that_covers_a_fenced_controllers_lines_is_passed_over(url: str) -> None:
    old = filled(url)
    # The zombie had checked before the new one claimed: its record and its point reach storage afterwards.
    opened(url).append({"type": "a", "number": 11})
    old._segments.append(1, to_line({"seq": 12, "type": "a", "number": 99}))
    old._check_newest = lambda: None  # type: ignore[method-assign]
    old.save_point({"count": 99}, 11, old.mark())
    after = opened(url)
    assert (after.point and after.point.content, numbers(after)) == (7, [8, 9, 10, 11])
    assert any("covers lines that do not count" in problem.sentence for problem in after.problems)


def test_a_fenced_controller_writes_no_point(url: str) -> None:
    old = filled(url)
    opened(url)
    with pytest.raises(Fenced, match="incarnation 2"):
        old.save_point({"count": 10}, 10, old.mark())


def test_two_points_are_kept_and_readers_read_everything(url: str) -> None:
    filled(url, 30, tuple(range(3, 30, 3)))
    assert names(url) == ["000001-000000000025.json", "000001-000000000028.json"]
    assert len(JournalReader(url, "run").records()) == 31


def test_joined_objects_before_the_mark_are_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"memory://journal-{uuid.uuid4().hex}"
    monkeypatch.setattr("elastic.observe.object_segments.JOINED", 10)
    monkeypatch.setattr("elastic.observe.object_segments.ObjectSegments.__init__.__defaults__", (10,))
    filled(url, 35, (33,))
    after = opened(url)
    assert numbers(after) == [34, 35]
    fetched = [path.rpartition("/")[2] for path in after._segments._seen]  # type: ignore[attr-defined]
    assert min(fetched) == "00000031.jsonl"


def test_a_name_that_no_controller_made_is_ignored(url: str) -> None:
    filled(url)
    open_objects(url).put("run/journal/points/junk.json", [b"{}"])
    assert opened(url).problems == ()
    assert len(list(open_points(url, "run").newest_first(read))) == 2
