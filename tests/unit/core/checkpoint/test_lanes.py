"""Checkpoints of ranks that share layers: one manifest, a part for each lane, and who must not read it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from shard_records import (
    ROWS,
    SECOND,
    SECOND_GROUPS,
    SHAPES,
    manifest,
    of_two_lanes,
    recorded,
    records,
    shards_of_two_lanes,
)

from elastic.core.checkpoint.assembly import assemble
from elastic.core.checkpoint.lanes import cuts_of, lane_of
from elastic.core.checkpoint.manifest import Manifest
from elastic.core.checkpoint.manifest_json import from_json, to_json
from elastic.core.errors import IntegrityError, UsageError
from elastic.core.sharding import cuts
from elastic.core.sharding.cuts import Cut
from elastic.core.sharding.zero import zero12_layout


def test_each_lane_is_a_checkpoint_by_itself() -> None:
    whole = of_two_lanes()
    assert (whole.world_size, whole.tp) == (6, 2)
    first, second = lane_of(whole, 0), lane_of(whole, 1)
    assert (first.parameters, second.parameters) == (SHAPES, SECOND)
    assert [shard.rank for shard in second.shards] == [1, 3, 5], "by their ranks in the run"
    assert (first.world_size, first.tp) == (3, 1)
    alone = assemble(records(zero12_layout(SECOND_GROUPS, 3), SECOND), run_id="run-1")
    assert second.digests == alone.digests
    assert second.extra_state == first.extra_state == {"cursor": 40}


def test_it_survives_json_under_a_number_that_other_readers_do_not_know() -> None:
    whole = of_two_lanes()
    text = to_json(whole)
    assert json.loads(text)["format"] == 2
    assert json.loads(text)["manifest"]["mesh"] == {"dp": 3, "tp": 2}
    assert from_json(text) == whole


def test_without_lanes_the_format_stays() -> None:
    text = to_json(manifest())
    assert json.loads(text)["format"] == 1
    assert "mesh" not in json.loads(text)["manifest"]
    assert lane_of(manifest(), 0) == manifest()


@pytest.mark.parametrize("mesh", [{"dp": 6, "tp": 1}, {"dp": 2, "tp": 2}, {"dp": 0, "tp": 6}, {"dp": 3}])
def test_a_mesh_that_is_not_that_of_its_ranks_is_refused(mesh: dict[str, int]) -> None:
    from elastic.core.checkpoint import manifest_json

    body = json.loads(to_json(of_two_lanes()))["manifest"] | {"mesh": mesh}
    compact = manifest_json._compact(body)
    text = f'{{"format":2,"check":"{manifest_json._check(compact)}","manifest":{compact}}}'
    with pytest.raises(IntegrityError, match=r"mesh|'tp'"):
        from_json(text)


def test_a_rank_of_any_lane_that_is_missing_or_holds_too_little_is_named() -> None:
    with pytest.raises(IntegrityError, match=r"world size 6 needs one shard per rank: missing \[3\]"):
        assemble([shard for shard in shards_of_two_lanes() if shard.rank != 3], run_id="run-1")
    found = shards_of_two_lanes()
    found[3] = replace(found[3], chunks=found[3].chunks[1:], digests={})
    with pytest.raises(IntegrityError):
        assemble(found, run_id="run-1")
    found = shards_of_two_lanes()
    found[1] = replace(found[1], parameters=None)
    with pytest.raises(IntegrityError, match="the record of rank 1 does not name the parameters"):
        assemble(found, run_id="run-1")
    found = shards_of_two_lanes()
    found[5] = replace(found[5], tp=1)
    with pytest.raises(IntegrityError, match="differ in tp: 1 and 2"):
        assemble(found, run_id="run-1")


EVEN = Cut.evenly(0, (6, 4), 2)


def test_what_is_cut_is_read_of_the_record() -> None:
    assert cuts_of(manifest()) == {}
    assert cuts_of(recorded(cuts.to_json({"b": ROWS}))) == {"b": ROWS}


@pytest.mark.parametrize(
    ("found", "kind", "said"),
    [
        (of_two_lanes(), UsageError, r"saved with mesh: {tp: 2} and does not say which parts.*an older release"),
        (recorded(cuts.to_json({"b": "for a reason"})), UsageError, "the slices of 'b' cannot be put together: for a"),
        (
            recorded(cuts.to_json({"b": Cut.evenly(0, (6, 4), 2)})),
            IntegrityError,
            r"slices of 'b' in shapes \[\(3, 4\)",
        ),
        (recorded(cuts.to_json({})), IntegrityError, r"slices of 'b' in shapes \[\(3, 4\), \(2, 4\)\]"),
        (recorded(cuts.to_json({"b": ROWS, "x": ROWS})), IntegrityError, "slices of 'x' in shapes"),
        (recorded(cuts.to_json({"b": Cut.evenly(0, (6, 4), 3)})), IntegrityError, "it is of 3 lanes, not of 2"),
    ],
)
def test_slices_that_cannot_be_put_together_are_refused(found: Manifest, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        cuts_of(found)
