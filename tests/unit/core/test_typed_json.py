"""Dataclasses as JSON by their annotations: what is written is read back equal, and nothing else is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.checkpoint.manifest import ShardRecord, StoredTensor
from elastic.core.sharding.layout import Chunk
from elastic.core.typed_json import NOT_KEPT, decode, encode


class Color(str, Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Left:
    number: int


@dataclass(frozen=True)
class Right:
    number: int
    more: float


@dataclass(frozen=True)
class Whole:
    side: Left | Right
    maybe: Left | None
    either: Left | Right | None
    by_number: Mapping[int, Right]
    colors: frozenset[Color]
    pairs: list[tuple[str, int]]
    word: Literal["a", "b"]
    anything: Any
    many: tuple[float, ...] = ()
    left_out: dict[str, int] = field(default_factory=dict, metadata=NOT_KEPT)


LEFT = st.builds(Left, st.integers())
RIGHT = st.builds(Right, st.integers(), st.floats(allow_nan=False))
WHOLE = st.builds(
    Whole, LEFT | RIGHT, st.none() | LEFT, st.none() | LEFT | RIGHT, st.dictionaries(st.integers(), RIGHT, max_size=3),
    st.frozensets(st.sampled_from(Color)), st.lists(st.tuples(st.text(), st.integers()), max_size=3),
    st.sampled_from(["a", "b"]), st.none() | st.text() | st.lists(st.integers()),
    st.lists(st.floats(allow_nan=False)).map(tuple),
)  # fmt: skip


@given(WHOLE)
def test_what_is_written_is_read_back_equal(value: Whole) -> None:
    assert decode(Whole, json.loads(json.dumps(encode(value)))) == value


def test_what_is_not_kept_has_its_default_or_is_handed_over() -> None:
    value = Whole(Left(1), None, None, {}, frozenset(), [], "a", 1, left_out={"x": 1})
    assert "left_out" not in encode(value)
    assert decode(Whole, encode(value)).left_out == {}
    assert decode(Whole, encode(value), left_out={"x": 1}) == value


@pytest.mark.parametrize(
    "data",
    [
        {}, [], None, {"number": "1", "more": 1.0}, {"number": 1.5, "more": 1.0}, {"number": True, "more": 1.0},
        {"number": 1, "more": 1.0, "new": 0}, {"number": 1},
    ],
)  # fmt: skip
def test_other_fields_and_other_types_are_refused(data: Any) -> None:
    with pytest.raises(ValueError, match=r"expected|fields"):
        decode(Right, data)


def test_only_the_members_of_a_union_are_made() -> None:
    data = encode(Whole(Left(1), None, None, {}, frozenset(), [], "a", 1))
    with pytest.raises(ValueError, match="'Whole' is none of Left, Right"):
        decode(Whole, {**data, "side": ["Whole", {}]})


def test_a_shards_record_travels_between_plain_processes() -> None:
    record = ShardRecord(
        1, 2, 3, 40, "rank-00001-of-00002.safetensors", 4096, "0" * 16, (StoredTensor("fp32/group0", "F32", 7, 128),),
        (Chunk("w", 0, 7, "group0", 0),), {"fp32/w": 2**64 - 1}, {"lr": 0.1, "readers": [[1, {"at": None}]]}, 2,
        {"w": (7,)},
    )  # fmt: skip
    assert decode(ShardRecord, json.loads(json.dumps(encode(record)))) == record
    assert decode(ShardRecord, encode(replace(record, extra_state=None, parameters=None))).parameters is None
    with pytest.raises(ValueError, match="expected"):
        decode(ShardRecord, {**encode(record), "rank": "1"})
