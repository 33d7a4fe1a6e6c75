from __future__ import annotations

import contextlib
import json
import math
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shard_records import GROUPS, KINDS, SHAPES, example, manifest, records

from elastic.core.checkpoint.assembly import assemble
from elastic.core.checkpoint.manifest import ShardRecord
from elastic.core.checkpoint.manifest_json import check_json, from_json, to_json
from elastic.core.data.readers import READERS, ReaderStates
from elastic.core.errors import IntegrityError
from elastic.core.names import checkpoint_id
from elastic.core.sharding.layout import Chunk
from elastic.core.sharding.zero import zero3_layout, zero12_layout


def test_assembles_in_any_order() -> None:
    found = assemble(example()[::-1], run_id="run-1", versions={"torch": "2"}, written_at=1.5)
    assert found == manifest()
    assert found.id == checkpoint_id(40, 3)
    assert (found.world_size, found.zero_stage, found.extra_state) == (4, 2, {"cursor": 40})
    assert found.parameters == SHAPES
    assert [shard.rank for shard in found.shards] == [0, 1, 2, 3]
    assert all(not shard.digests and shard.extra_state is None and shard.parameters is None for shard in found.shards)
    assert found.digests == {
        f"{kind}/{name}": sum(2**63 + i for i in range(math.prod(SHAPES[name]))) % 2**64
        for kind in KINDS
        for name in "abc"
    }


@pytest.mark.parametrize("world", [1, 2, 3, 5, 40])
def test_digests_do_not_depend_on_the_world_size(world: int) -> None:
    for layout in (zero12_layout(GROUPS, world), zero3_layout(GROUPS, world, 3)):
        assert assemble(records(layout, SHAPES), run_id="r").digests == manifest().digests


def test_format_1_keeps_the_keys_of_its_first_manifests() -> None:
    """Earlier versions wrote the extra state under "client"; manifests of format 1 stay readable both ways."""
    body = json.loads(to_json(manifest()))["manifest"]
    assert body["client"] == {"cursor": 40}
    assert "extra_state" not in body
    reported = json.loads(to_json(replace(manifest(), shards=tuple(example()))))["manifest"]["shards"]
    assert [shard.get("client") for shard in reported] == [{"cursor": 40}, None, None, None]
    assert all("pieces" in shard for shard in reported)


def without(records_: list[ShardRecord], rank: int) -> list[ShardRecord]:
    return [record for record in records_ if record.rank != rank]


def change(records_: list[ShardRecord], number: int, /, **fields: Any) -> list[ShardRecord]:
    return [replace(record, **fields) if record.rank == number else record for record in records_]


def fewer_kinds(rank: int) -> list[ShardRecord]:
    shard = example()[rank]
    return change(
        example(),
        rank,
        tensors=tuple(tensor for tensor in shard.tensors if not tensor.key.startswith("exp_avg/")),
        digests={key: value for key, value in shard.digests.items() if not key.startswith("exp_avg/")},
    )


BROKEN = {
    "no shard": ([], "at least one rank"),
    "missing rank": (without(example(), 2), r"missing \[2\]"),
    "missing last rank": (without(example(), 3), r"missing \[3\]"),
    "foreign rank": (change(example(), 3, rank=4), r"not members \[4\]"),
    "doubled rank": ([*example(), example()[1]], "rank 1 reported two shards"),
    "other generation": (change(example(), 1, generation=2), "differ in generation"),
    "other step": (change(example(), 1, step=39), "differ in step"),
    "other world size": (change(example(), 1, world_size=5), "differ in world_size"),
    "no parameters": (change(example(), 0, parameters=None), "does not name the parameters"),
    "lost chunk": (change(example(), 1, chunks=()), "no rank holds elements"),
    "chunk held twice": (change(example(), 1, chunks=example()[0].chunks), "both hold|no rank holds"),
    "unknown parameter": (change(example(), 1, chunks=(Chunk("z", 0, 1, "group0", 0),)), "'z' is in a shard but not"),
    "chunk outside": (change(example(), 1, chunks=(Chunk("a", 0, 1, "group0", 99),)), "does not fit"),
    "a kind missing on one rank": (fewer_kinds(1), "no rank holds elements"),
    "parameter missing": (change(example(), 0, parameters={**SHAPES, "d": (2,)}), "no shard holds 'd'"),
    "parameter larger": (change(example(), 0, parameters={**SHAPES, "c": (2,)}), r"no rank holds elements \[1, 2\)"),
    "parameter smaller": (change(example(), 0, parameters={**SHAPES, "b": (3, 3)}), "the model does not have"),
    "other dtype": (
        change(example(), 1, tensors=tuple(replace(t, dtype="BF16") for t in example()[1].tensors)),
        "as F32 and BF16",
    ),
    "no digest": (change(example(), 1, digests={}), "content checks and stored state differ"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_assemble_refuses(case: str) -> None:
    shards, message = BROKEN[case]
    with pytest.raises(IntegrityError, match=message):
        assemble(shards, run_id="run-1")


TEXT = st.text(max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    world=st.integers(1, 9),
    stage3=st.booleans(),
    extra_state=st.dictionaries(TEXT, JSON, max_size=3),
    written_at=st.floats(0, 2e9),
    strip=st.booleans(),
)
def test_json_gives_back_what_was_written(sizes, world, stage3, extra_state, written_at, strip) -> None:
    group = [(f"p{number}", numel) for number, numel in enumerate(sizes)]
    layout = zero3_layout([group], world, 5) if stage3 else zero12_layout([group], world)
    reported = records(layout, {name: (numel,) for name, numel in group})
    found = assemble(
        change(reported, 0, extra_state=extra_state), run_id="run-1", versions={"x": "1"}, written_at=written_at
    )
    if not strip:  # records with everything in them have an exact form as well
        found = replace(found, shards=tuple(reported))
    assert from_json(to_json(found)) == found
    assert from_json(to_json(found).encode()) == found
    assert from_json(json.dumps(json.loads(to_json(found)), indent=2)) == found


def with_readers(*owned: list[int] | None, total: int = 5) -> list[ShardRecord]:
    """What ranks report that read a stream with these readers."""
    found = []
    for shard, readers in zip(example(len(owned)), owned, strict=True):
        states = {} if readers is None else {READERS: ReaderStates(total, {r: {"count": r} for r in readers}).to_json()}
        found.append(replace(shard, extra_state={**(shard.extra_state or {}), **states}))
    return found


def test_the_manifest_has_the_reader_states_of_all_ranks() -> None:
    found = assemble(with_readers([0, 1], [2], [3, 4]), run_id="run-1")
    assert found.extra_state["cursor"] == 40
    assert ReaderStates.from_json(found.extra_state[READERS]).states == {
        reader: {"count": reader} for reader in range(5)
    }
    assert from_json(to_json(found)) == found
    assert all(shard.extra_state is None for shard in found.shards)


@pytest.mark.parametrize(
    ("owned", "message"),
    [
        (([0, 1], [2], [4]), r"of 5 readers, the states of \[3\] are missing"),
        (([0, 1], [1, 2], [3, 4]), "ranks 0 and 1 both have a state of reader 1"),
        (([0, 1, 2], None, [3, 4]), "rank 1 has no reader states"),
    ],
)
def test_a_missing_or_doubled_reader_state_is_no_checkpoint(owned: Any, message: str) -> None:
    with pytest.raises(IntegrityError, match=message):
        assemble(with_readers(*owned), run_id="run-1")


def test_reader_states_that_cannot_be_read_are_no_checkpoint() -> None:
    first, *others = with_readers([0, 1], [2, 3, 4])
    for broken in ({}, {"total": 5}, {"total": "x", "states": {}}, {"total": 5, "states": {"x": 1}}, 3):
        with pytest.raises(IntegrityError, match="the states of a stream's readers cannot be read"):
            assemble([replace(first, extra_state={READERS: broken}), *others], run_id="run-1")


def test_a_thousand_ranks_fit() -> None:
    group = [(f"layers.{number}.weight", 4096 + number) for number in range(60)]
    layout = zero3_layout([group], 1000)
    chunks = sum(len(rank.chunks) for rank in layout.ranks)
    found = assemble(records(layout, {name: (numel,) for name, numel in group}), run_id="run-1")
    # A few bytes for each of 60,000 chunks, and a few hundred for each rank.
    assert len(to_json(found)) < 12 * chunks + 700 * 1000


def rewritten(change_body: Any) -> str:
    """A manifest with a changed body and a check that fits it: damage that only the strict reader can see."""
    import hashlib

    data = json.loads(to_json(manifest()))
    change_body(data["manifest"])
    text = json.dumps(data["manifest"], separators=(",", ":"))
    data["check"] = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return json.dumps(data)


def put(*path: Any, value: Any) -> Any:
    def apply(body: Any) -> None:
        for key in path[:-1]:
            body = body[key]
        body[path[-1]] = value

    return apply


BAD = {
    "path upwards": (put("shards", 1, "file", value="../x"), "not a plain file name"),
    "absolute path": (put("shards", 1, "file", value="/etc/passwd"), "not a plain file name"),
    "path in a folder": (put("shards", 1, "file", value="a/b"), "not a plain file name"),
    "windows path": (put("shards", 1, "file", value="..\\b"), "not a plain file name"),
    "run id upwards": (put("run_id", value="../other"), "no valid run"),
    "other id": (put("id", value="latest"), "not the id of a checkpoint"),
    "id of another step": (put("step", value=41), "about another step"),
    "shard of another step": (put("shards", 2, "step", value=39), "shard of another step"),
    "text for a number": (put("step", value="40"), "'step' is a str, not a int"),
    "true for a number": (put("world_size", value=True), "'world_size' is a bool"),
    "negative": (put("shards", 0, "bytes", value=-1), "at least 0"),
    "rank missing": (lambda body: body["shards"].pop(), "one shard for each"),
    "field missing": (lambda body: body["shards"][0].pop("xxh3"), "lacks the field 'xxh3'"),
    "extra state missing": (lambda body: body.pop("client"), "lacks the field 'client'"),
    "extra state is a list": (put("client", value=[]), "'client' is a list"),
    "unknown dtype": (put("shards", 0, "tensors", 0, 1, value="PICKLE"), "none that is written here"),
    "tensor behind the end": (put("shards", 0, "tensors", 0, 3, value=10**9), "would end behind its file"),
    "tensor twice": (put("shards", 0, "tensors", 0, 0, value="exp_avg/group0"), "two tensors of one name"),
    "column missing": (put("shards", 0, "pieces", value=[0, 1, 2, 3]), "five columns"),
    "column unknown": (put("shards", 0, "pieces", 0, value=999), "entry 999"),
    "chunk outside": (lambda body: body.update(columns=[[n + 1000 for n in c] for c in body["columns"]]), "."),
    "digest": (put("digests", "fp32/a", value="xyz"), "no number"),
    "shape": (put("parameters", "a", value=[-7]), "at least 0"),
    "shape is a number": (put("parameters", "a", value=7), "is a int, not a list"),
    "written_at": (put("written_at", value="now"), "'written_at'"),
    "written_at is huge": (put("written_at", value=10**400), "'written_at'"),
}


@pytest.mark.parametrize("case", BAD)
def test_reading_refuses(case: str) -> None:
    body, message = BAD[case]
    with pytest.raises(IntegrityError, match=message):
        from_json(rewritten(body))


def test_a_huge_world_size_is_one_sentence_and_not_gigabytes() -> None:
    def grow(body: Any) -> None:
        body["world_size"] = 10**7
        for shard in body["shards"]:
            shard["world_size"] = 10**7

    text = rewritten(grow)
    tracemalloc.start()
    try:
        with pytest.raises(IntegrityError, match="one shard for each of 10000000 ranks"):
            from_json(text)
        with pytest.raises(IntegrityError, match="world size 10000000 needs one shard per rank: missing"):
            assemble([replace(each, world_size=10**7) for each in example()], run_id="run")
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("text", ["", "null", "[]", "{", '{"format":2}', "\x00", "[" * 100_000, b"\xff\xfe\x00"])
def test_what_is_no_manifest(text: str | bytes) -> None:
    with pytest.raises(IntegrityError, match="the manifest"):
        from_json(text)


@given(data=st.data())
def test_any_damage_is_found(data: st.DataObject) -> None:
    text = bytearray(to_json(manifest()).encode())
    place = data.draw(st.integers(0, len(text) - 1))
    text[place] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(IntegrityError):  # and no other error
        assert from_json(bytes(text)) == manifest()  # a flip may leave the meaning alone: upper-case hex, say
    with pytest.raises(IntegrityError):
        from_json(bytes(text[:place]))


def test_client_state_without_an_exact_form_is_named() -> None:
    with pytest.raises(IntegrityError, match=r"extra_state\.user\.best has the key 3"):
        check_json({"user": {"best": {3: 1}}}, "extra_state")
    with pytest.raises(IntegrityError, match=r"extra_state\.x\[1\] is a set"):
        to_json(replace(manifest(), extra_state={"x": [1, {2}]}))
    assert from_json(to_json(replace(manifest(), extra_state={"betas": (0.9, 0.999)}))).extra_state == {
        "betas": [0.9, 0.999]
    }
    assert from_json(to_json(replace(manifest(), extra_state={"best": math.inf}))).extra_state == {"best": math.inf}
