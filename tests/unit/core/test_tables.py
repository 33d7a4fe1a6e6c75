"""Immutable tables: what their successors hold, what they share, and what a change costs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic.core.tables import Amounts, Numbers, Table

numbers = st.integers(0, 2000)
changes = st.lists(st.one_of(st.dictionaries(numbers, st.integers(), max_size=6), st.lists(numbers, max_size=6)))


@given(changes)
def test_a_table_holds_what_a_dictionary_would(history: list[dict[int, int] | list[int]]) -> None:
    table, model = Table[int](), dict[int, int]()
    for change in history:
        before, was = table, dict(model)
        if isinstance(change, dict):
            table = table.put(change)
            model |= change
        else:
            table = table.without(change)
            model = {number: value for number, value in model.items() if number not in change}
        assert before == was, "the one before has not changed"
        assert (table, len(table), sorted(table)) == (model, len(model), sorted(model))
        assert sorted(table.values()) == sorted(model.values()) == sorted(value for _, value in table.items())
        assert all(number in table and table.get(number) == value for number, value in model.items())
        assert table == Table(model)
        asked = [*range(0, 2000, 7), *model, 1, 1]
        assert table.among(asked) == [number for number in asked if number in model]


def test_numbers_that_only_grow_come_in_their_order() -> None:
    table = Amounts()
    for number in range(1000):
        table = table.put({number: 1})
    assert list(table.without(range(0, 1000, 3)).put({1: 5})) == [number for number in range(1000) if number % 3]


def test_a_change_shares_all_chunks_but_its_own() -> None:
    before = Table(dict.fromkeys(range(10_000), 0))
    after = before.put({5000: 1})
    own = [place for place, chunk in after._chunks.items() if chunk is not before._chunks[place]]
    assert own == [5000 >> 8]
    assert before.without((20_000,)) is before


def test_some_of_the_numbers_in_the_order_in_which_they_are_asked_for() -> None:
    asked = [301, 7, 1, 9000, 301]
    assert Table(dict.fromkeys((1, 300, 301))).among(asked) == Numbers((1, 300, 301)).among(asked) == [301, 1, 301]


def test_a_set_of_numbers() -> None:
    some = Numbers((3, 1)).plus((2, 700)).minus((1, 9))
    assert (some, len(some), 2 in some, 1 in some, "2" in some) == ({2, 3, 700}, 3, True, False, False)
    assert Numbers() == frozenset()
