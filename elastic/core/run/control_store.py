"""Ray's control store (the GCS) goes away and comes back: training does not need it, but new nodes and workers do.

The head of a cluster may be lost while its workers train on. Until the control store is back (restarted over its
persistent storage) what is being placed or started stands still, so no time limit counts against it.
"""

from __future__ import annotations

from dataclasses import replace

from elastic.core.events import ControlStoreAway, ControlStoreBack
from elastic.core.run.phase import Waiting
from elastic.core.run.transition import Transition


def away(transition: Transition, event: ControlStoreAway) -> None:
    if transition.fleet.control_store_away:
        return
    transition.set_fleet(control_store_away=True)
    transition.say(
        f"Ray's control store has not answered for {event.silent_s:.1f} s: training continues, "
        "nodes and workers can come again when it is back",
        kind="control-store",
    )


def back(transition: Transition, event: ControlStoreBack) -> None:
    if not transition.fleet.control_store_away:
        return
    transition.set_fleet(control_store_away=False)
    restart_starts(transition)
    if isinstance(transition.state.phase, Waiting):
        transition.enter(replace(transition.state.phase, since=transition.now))
    transition.say(f"Ray's control store answers again, after {event.away_s:.1f} s", kind="control-store")


def restart_starts(transition: Transition) -> None:
    """No worker could start in the meantime, so every start limit restarts."""
    workers = transition.fleet.workers
    late = {number: replace(workers[number], since=transition.now) for number in workers.starting}
    transition.set_fleet(workers=workers.put(late))
