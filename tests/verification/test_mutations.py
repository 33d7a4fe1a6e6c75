"""Every mutation of the corpus makes a difference and is refused before the first step; without it all is well."""

from __future__ import annotations

import pytest

from verification import corpus as configurations
from verification.run import Verdict, examine
from verification.tools import Mutation

pytestmark = [
    pytest.mark.processes,
    # What DeepSpeed and torch warn of at import and in use is not ours to mend.
    pytest.mark.filterwarnings("ignore"),
]

# Numbered bugs first; those after them have no number.
REQUIRED = {1, 2, 4, 5, 6, 8, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 21, 22, 23, 25, 26, 27, 28, 30, 32, 33, 34}


def _corpus() -> list[Mutation]:
    import os

    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    return configurations.corpus()


@pytest.mark.parametrize("mutation", _corpus(), ids=lambda mutation: mutation.id)
def test_is_refused_where_it_makes_a_difference(mutation: Mutation) -> None:
    verdict: Verdict = examine(mutation)
    assert verdict.healthy == "", "the same configuration without the mutation does not pass"
    assert verdict.difference, "the mutation changes nothing here: being refused would mean nothing"
    assert verdict.good, f"{mutation}: {verdict}"


def test_the_corpus_is_complete() -> None:
    ids = [mutation.id for mutation in _corpus()]
    assert len(set(ids)) == len(ids)
    numbers = {int(name.lstrip("M").rstrip("abs")) for name in ids if name.startswith("M")}
    assert numbers >= REQUIRED
    worlds = {mutation.worlds for mutation in _corpus()}
    assert {(1, 2), (2, 1), (2, 3), (3, 2), (4, 6), (6, 4), (7, 5), (12, 5)} <= worlds
