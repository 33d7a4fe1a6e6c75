"""Checkpoints of ranks that have different layers: one manifest of the whole model, and the part of one stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from shard_records import GROUPS, SHAPES, records

from elastic.core.checkpoint.assembly import assemble
from elastic.core.checkpoint.lanes import CUTS
from elastic.core.checkpoint.manifest import Manifest, ShardRecord
from elastic.core.checkpoint.manifest_json import from_json, to_json
from elastic.core.checkpoint.stages import part_of, union_of_extra
from elastic.core.errors import IntegrityError
from elastic.core.names import shard_file
from elastic.core.sharding.cuts import Cut
from elastic.core.sharding.cuts import from_json as from_record
from elastic.core.sharding.cuts import to_json as to_record
from elastic.core.sharding.zero import zero12_layout

# The second stage has layers of its own, and a copy of the tied "a", which it does not save.
SECOND = {"a": SHAPES["a"], "x": (4,), "y": (5,)}
SECOND_GROUPS = [[("x", 4)], [("y", 5)]]


def extra(first: list[str], second: list[str], lr: float = 0.1, **more: Any) -> dict[str, Any]:
    groups = [{"names": names, "hyper": {"lr": lr}} for names in (first, second)]
    return {
        "optimizer": {
            "class": "AdamW",
            "groups": groups,
            "scalars": [{"names": first + second, "values": {"step": 3}}],
        },
        "fleeting_buffers": [],
        "model": {"class": "PipelineModule", "aliases": {}, "hugging_face": None},
        "caller": {"cursor": 40},
        **more,
    }


FIRST_EXTRA = extra(["a", "b"], ["c"], modules={"0": 1}, fleeting_buffers=["cache"])
SECOND_EXTRA = extra(["a", "x"], ["y"], modules={"4": 2}, grown_buffers={"y": None})


def shards(pipelines: int = 3, second: Mapping[str, Any] = SECOND_EXTRA, **changed: Any) -> list[ShardRecord]:
    """What `pipelines` of two ranks report, in the order of their ranks."""
    stages = [
        (records(zero12_layout(GROUPS, pipelines), SHAPES), SHAPES, FIRST_EXTRA),
        (records(zero12_layout(SECOND_GROUPS, pipelines), SECOND), {**SECOND, **changed}, second),
    ]
    found = []
    for pipeline in range(pipelines):
        for stage, (own, shapes, said) in enumerate(stages):
            rank = 2 * pipeline + stage
            found.append(
                replace(
                    own[pipeline],
                    rank=rank,
                    world_size=2 * pipelines,
                    file=shard_file(rank, 2 * pipelines),
                    parameters=shapes if pipeline == 0 else None,
                    extra_state=said if pipeline == 0 else None,
                )
            )
    return found


def of_two_stages() -> Manifest:
    return assemble(shards(), run_id="run-1")


def test_it_is_a_checkpoint_of_the_whole_model_without_lanes() -> None:
    whole = of_two_stages()
    assert whole.parameters == {**SHAPES, **SECOND}
    assert whole.tp == 1
    optimizer = whole.extra_state["optimizer"]
    assert [group["names"] for group in optimizer["groups"]] == [["a", "b", "x"], ["c", "y"]]
    assert [entry["names"] for entry in optimizer["scalars"]] == [["a", "b", "c"], ["x", "y"]], "the tied one once"
    assert whole.extra_state["modules"] == {"0": 1, "4": 2}
    assert whole.extra_state["caller"] == {"cursor": 40}
    assert from_json(to_json(whole)) == whole


def test_a_stage_reads_its_part_alone_with_the_tied_tensor_that_another_has_saved() -> None:
    part = part_of(of_two_stages(), SECOND, {"4"})
    assert part.parameters == SECOND
    assert {key.split("/")[1] for key in part.digests} == set(SECOND)
    optimizer = part.extra_state["optimizer"]
    assert [group["names"] for group in optimizer["groups"]] == [["a", "x"], ["y"]]
    assert sorted(name for entry in optimizer["scalars"] for name in entry["names"]) == ["a", "x", "y"]
    assert part.extra_state["modules"] == {"4": 2}
    assert part.extra_state["grown_buffers"] == {"y": None}
    assert part.extra_state["fleeting_buffers"] == []
    assert len(part.shards) == 6, "wherever its tensors lie"


def test_a_tied_tensor_that_two_stages_save_is_told() -> None:
    groups = [[("a", 7), ("x", 4)], [("y", 5)]]
    doubled = [
        replace(own, rank=shard.rank, world_size=6, file=shard.file, parameters=shard.parameters,
                extra_state=shard.extra_state)
        for shard, own in zip(shards()[1::2], records(zero12_layout(groups, 3), SECOND), strict=True)
    ]  # fmt: skip
    with pytest.raises(IntegrityError, match="both hold elements from"):
        assemble([*shards()[::2], *doubled], run_id="run-1")


def test_a_stage_that_is_missing_or_disagrees_is_told() -> None:
    with pytest.raises(IntegrityError, match="the stages of a pipeline have different parameter groups"):
        assemble(shards(second=extra(["a", "x"], ["y"], lr=0.2)), run_id="run-1")
    with pytest.raises(IntegrityError, match="ranks hold 'a' in shapes"):
        assemble(shards(a=(7, 1)), run_id="run-1")
    unnamed = [replace(shard, parameters=None) if shard.rank == 1 else shard for shard in shards()]
    with pytest.raises(IntegrityError, match="is in a shard but not in the model"):
        assemble(unnamed, run_id="run-1")


def test_stages_say_of_their_own_layers_how_they_are_cut() -> None:
    one, other = Cut.evenly(0, (4,), 2), Cut.evenly(0, (6,), 2)
    said = [{**FIRST_EXTRA, CUTS: to_record({"b": one})}, {**SECOND_EXTRA, CUTS: to_record({"x": one, "y": other})}]
    assert from_record(union_of_extra(said)[CUTS], 2) == {"b": one, "x": one, "y": other}
