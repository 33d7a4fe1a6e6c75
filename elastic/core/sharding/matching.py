"""The assignment problem, sparse: columns for rows, no column twice, such that their gains add up to the most.

Rows are added one by one; each takes the cheapest path of moves (Dijkstra) under prices that keep every cost at or
above zero (Kuhn 1955; Edmonds and Karp 1972; Tomizawa 1971). Where rows mostly want columns of their own, a path is a
step or two long, so that ten thousand rows take a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

# Exact for 128 rows with six columns each whatever the gains: a path looks at each edge once at most.
_LEAST_STEPS = 100_000
_STEPS_PER_ROW = 10


def best_matching(gains: Sequence[Mapping[int, int]]) -> list[int | None]:
    """The column of each row; None for a row that gains nothing from those that are left.

    `gains[row]` has the columns that a row gains from, with gains above 0. Of equal sums always the same one. Beyond
    100,000 steps, or 10 for each row, the rows that remain take the best of what is free, each in its turn.
    """
    matching = _Matching(gains)
    for row in range(len(gains)):
        matching.add(row)
    return matching.column


class _Matching:
    """The best matching of the rows so far. Its proof: gain(row, column) <= profit(row) + price(column) everywhere,
    with equality where the two are matched; whatever is not matched has a profit or a price of 0."""

    def __init__(self, gains: Sequence[Mapping[int, int]]) -> None:
        self.column: list[int | None] = [None] * len(gains)
        self._gains = gains
        self._row: dict[int, int] = {}
        self._profit = [0] * len(gains)
        self._price: dict[int, int] = {}
        self._steps = max(_LEAST_STEPS, _STEPS_PER_ROW * len(gains))

    def add(self, row: int) -> None:
        """Give `row` a column where the sum grows by it; rows that have one may change to another, one may lose it."""
        late = self._steps < 0
        # What each column costs the row at least: the best comes first, of equal ones the first.
        offers = [
            (self._price.get(column, 0) - gain, column)
            for column, gain in self._gains[row].items()
            if not (late and column in self._row)
        ]
        best, column = min(offers, default=(0, row))
        self._profit[row] = max(0, -best)
        if best < 0 and column not in self._row:
            self._take({column: row}, column)
        elif not late:
            self._move(row)

    def _move(self, row: int) -> None:
        """`add` where the row's best column is taken: whatever move costs the others least, or nothing for the row."""
        rows, columns, came = {row: 0}, dict[int, int](), dict[int, int]()
        # What the cheapest end costs that is known: so far, that `row` gets nothing.
        cost, last, free_column = self._profit[row], row, None
        ahead: list[tuple[int, int, int]] = []
        self._look(ahead, row, 0)
        while ahead and ahead[0][0] < cost:
            so_far, column, by = heappop(ahead)
            if column in came:
                continue
            came[column], columns[column] = by, so_far
            if column not in self._row:
                cost, free_column = so_far, column
                break
            holder = self._row[column]
            rows[holder] = so_far
            if so_far + self._profit[holder] < cost:
                cost, last = so_far + self._profit[holder], holder
            self._look(ahead, holder, so_far)
        for each, so_far in rows.items():
            self._profit[each] -= cost - so_far
        for each, so_far in columns.items():
            self._price[each] = self._price.get(each, 0) + cost - so_far
        if free_column is None:
            free_column, self.column[last] = self.column[last], None
        self._take(came, free_column)

    def _look(self, ahead: list[tuple[int, int, int]], row: int, so_far: int) -> None:
        """Add where `row`, which `so_far` has been paid for, could go."""
        self._steps -= len(self._gains[row])
        paid = so_far + self._profit[row]
        for column, gain in self._gains[row].items():
            heappush(ahead, (paid + self._price.get(column, 0) - gain, column, row))

    def _take(self, came: Mapping[int, int], column: int | None) -> None:
        """Along the path back to the row that was added, each row takes the column that it was left for."""
        while column is not None:
            row = came[column]
            self._row[column] = row
            column, self.column[row] = self.column[row], column
