"""Copies beside the training: no optimizer step overtakes one, and what goes wrong is told before the next update."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from elastic.core.errors import ElasticError
from elastic.training.state.copier import Copier
from elastic.training.state.host import Transfer

LIMIT_S = 20.0


class Held(Transfer):
    """A copy that is made when the test says so."""

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        super().__init__([(target, source)], [])
        object.__setattr__(self, "go", threading.Event())

    def enqueue(self) -> None:
        assert self.go.wait(LIMIT_S)  # type: ignore[attr-defined]
        super().enqueue()


@pytest.fixture
def copier() -> Iterator[Copier]:
    made = Copier(torch.device("cpu"))
    yield made
    made.close()


def test_an_update_waits_until_what_it_changes_was_copied(copier: Copier) -> None:
    source, target = torch.ones(8), torch.zeros(8)
    copy, fenced = Held(target, source), threading.Event()
    copier.start(copy, lambda: None)

    def update() -> None:
        copier.fence()
        fenced.set()
        source.add_(1.0)

    training = threading.Thread(target=update)
    training.start()
    assert not fenced.wait(0.1), "the update has overtaken the copy"
    copy.go.set()  # type: ignore[attr-defined]
    training.join(LIMIT_S)
    assert copier.drain(LIMIT_S)
    assert source.tolist() == [2.0] * 8
    assert target.tolist() == [1.0] * 8


def test_what_follows_is_told_when_everything_is_there(copier: Copier) -> None:
    source, target, seen = torch.arange(4.0), torch.full((4,), 9.0), []
    copier.start(Transfer([(target[:3], source[:3])], [target[3:]]), lambda: seen.append(target.tolist()))
    assert copier.drain(LIMIT_S)
    assert seen == [[0.0, 1.0, 2.0, 0.0]]


def test_a_copy_that_failed_stops_the_next_update_and_is_not_told_as_done(copier: Copier) -> None:
    told: list[str] = []
    copier.start(Transfer([(torch.zeros(3), torch.ones(4))], []), lambda: told.append("done"))
    with pytest.raises(ElasticError, match="could not be copied"):
        copier.fence()
    assert copier.drain(LIMIT_S)
    assert told == []
    assert copier.fence() == 0.0


def test_closing_finishes_what_was_started(copier: Copier) -> None:
    source, target = torch.ones(8), torch.zeros(8)
    copier.start(Transfer([(target, source)], []), lambda: None)
    copier.close()
    assert target.tolist() == [1.0] * 8
