"""How a controller's process ends.

Ray gives a restarted actor the id of the one before: `ray.kill` of the own handle ends whichever process has that id
now. A process that was frozen while Ray started its successor must therefore never use it.
"""

from __future__ import annotations

import asyncio
import logging
import os

import ray

logger = logging.getLogger(__name__)

_ASK_LIMIT_S = 5.0


def end_actor() -> None:
    """End this actor for good: Ray does not restart it. Only for the controller whose run is over."""
    ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def restart_process() -> None:
    """End this process as a crash would: Ray restarts the actor, which replays the journal."""
    logging.shutdown()
    os._exit(1)


async def end_fenced() -> None:
    """End this process, and leave its successor alone.

    Where Ray's control store says that the actor is still this process, the newer controller is another actor (of a
    resumed run): then this actor must not be restarted. In doubt only the process ends.
    """
    try:
        current = await asyncio.wait_for(asyncio.to_thread(is_current), _ASK_LIMIT_S)
    except Exception as error:  # noqa: BLE001 - this process ends in any case
        logger.warning("it is not known whether another process is this actor now: %s", error or type(error).__name__)
        current = False
    if current:
        end_actor()
    else:
        logging.shutdown()
        os._exit(0)


def is_current() -> bool:
    """Whether the control store takes this process for its actor. Blocks while the control store is away."""
    context = ray.get_runtime_context()
    known = ray._private.state.actors(context.get_actor_id())
    place = known.get("Address", {}).get("NodeID"), known.get("Pid")
    return bool(place == (context.get_node_id(), os.getpid()) and known.get("State") == "ALIVE")
