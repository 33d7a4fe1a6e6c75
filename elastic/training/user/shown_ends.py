"""Which ends of steps a loop has been shown, that asks for them: accelerate's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ShownEnds:
    """Of one engine, through its generations. `last`: the step whose end was shown last. `again`: ends of repeated
    steps are shown a second time; `hidden`: the step at hand is a repeated one, whose end is not. `collectives`: the
    loop has some of its own that may depend on what it is shown."""

    last: int = 0
    again: bool = False
    hidden: bool = False
    collectives: bool = False
