"""Ray's control store (the GCS) goes away and comes back: training needs it for nothing, new nodes and workers for all.

The head of a cluster may be lost while its workers train on. Until the control store is back (restarted over its
persistent storage) what is being placed or started stands still, so no time limit counts against it.
"""

from __future__ import annotations

from dataclasses import replace

from elastic.core.events import ControlStoreAway, ControlStoreBack
from elastic.core.run.state import Waiting, WorkerPhase
from elastic.core.run.transition import Turn


def away(turn: Turn, event: ControlStoreAway) -> None:
    if turn.state.control_store_away:
        return
    turn.set(control_store_away=True)
    turn.say(
        f"Ray's control store has not answered for {event.silent_s:.1f} s: training goes on, "
        "nodes and workers can come again when it is back",
        kind="control-store",
    )


def back(turn: Turn, event: ControlStoreBack) -> None:
    if not turn.state.control_store_away:
        return
    turn.set(control_store_away=False)
    restart_starts(turn)
    if isinstance(turn.state.stage, Waiting):
        turn.enter(replace(turn.state.stage, since=turn.now))
    turn.say(f"Ray's control store answers again, after {event.away_s:.1f} s", kind="control-store")


def restart_starts(turn: Turn) -> None:
    """Nobody could start meanwhile, so nobody is late."""
    for worker in turn.state.workers.values():
        if worker.phase is WorkerPhase.STARTING:
            turn.put_worker(replace(worker, since=turn.now))
