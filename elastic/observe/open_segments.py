"""Opens the files of a journal, by the URL of its storage."""

from __future__ import annotations

from elastic.core.names import check_run_id
from elastic.observe.object_segments import ObjectSegments
from elastic.observe.replay_points import PointFiles
from elastic.observe.segments import LocalSegments, Segments
from elastic.store.address import local_root
from elastic.store.objects import TIMEOUT_S
from elastic.store.open import open_objects


def open_segments(url: str, run_id: str, timeout_s: float = TIMEOUT_S) -> Segments:
    """The journal of `run_id` below `url` (any fsspec URL). Raises UsageError for a URL that no file system knows.

    No request to a remote store takes longer than `timeout_s`.
    """
    check_run_id(run_id)
    root = local_root(url)
    if root is not None:
        return LocalSegments(root, f"{run_id}/journal")
    return ObjectSegments(open_objects(url, timeout_s), f"{run_id}/journal")


def open_points(url: str, run_id: str, timeout_s: float = TIMEOUT_S) -> PointFiles:
    """The replay points of the same journal."""
    check_run_id(run_id)
    return PointFiles(open_objects(url, timeout_s), f"{run_id}/journal/points")
