"""An object that stands for another one is taken for it, before and after the other one changes."""

from __future__ import annotations

from elastic.training.in_loop.stand_in import StandIn


class Optimizer:
    def __init__(self, rate: float) -> None:
        self.rate = rate

    def double(self) -> float:
        self.rate *= 2
        return self.rate

    def __repr__(self) -> str:
        return f"Optimizer({self.rate})"


def test_reads_and_writes_go_to_the_target() -> None:
    first, second = Optimizer(1.0), Optimizer(3.0)
    handle = StandIn(first)
    assert handle.double() == first.rate == 2.0
    handle.stand_in_for(second)
    handle.rate = 5.0
    assert (first.rate, second.rate, handle.rate) == (2.0, 5.0, 5.0)
    handle.extra = 1
    del handle.extra
    assert not hasattr(second, "extra")
    assert repr(handle) == "Optimizer(5.0)"


def test_isinstance_sees_the_targets_class() -> None:
    handle = StandIn(Optimizer(1.0))
    assert isinstance(handle, Optimizer)
    assert type(handle) is StandIn
