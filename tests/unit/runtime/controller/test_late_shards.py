"""Shards that come when they do not count any more."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from controller_life import BEGUN, Controller, begun

from elastic.core import events as ev
from elastic.runtime.messages import Item


def test_a_shard_from_behind_a_failed_audit_is_not_made_a_checkpoint(tmp_path: Path) -> None:
    """It was copied while a bit of it was wrong, and a commit would have an older checkpoint deleted."""
    begun(tmp_path, (*BEGUN, ev.GroupJoined(1, 1)))
    controller, taken = Controller(tmp_path), []
    controller.begin()
    committer: Any = SimpleNamespace(add=lambda shard, *_: taken.append(shard.step))
    controller.loop.connect(SimpleNamespace(perform=lambda action: None), committer)  # type: ignore[arg-type]

    def shard(step: int) -> Item:
        return Item("shard", SimpleNamespace(generation=1, step=step))

    async def life() -> None:
        controller.loop.deliver(0, [shard(12)], 1.0)
        controller.queue.append(ev.AuditFailed(1, 0, 13, (1,), True, "a bit has changed", 12, 12))
        await controller.turn()
        controller.loop.deliver(0, [shard(13), shard(11)], 2.0)

    asyncio.run(life())
    assert taken == [12, 11]
