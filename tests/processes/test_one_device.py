"""Two ranks on one device, one of which is killed: copier, pins, restore, verification and the next step are there.

Gradients travel over gloo: NCCL refuses two ranks on one device. Without a device one case runs on the CPU.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew
from test_oracle import BATCH, CEILING, LAST_STEP, Run, _assert_ended, _distance

from elastic.checkpoint.storage import CheckpointStore

AT = 4
ON_DEVICE = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
CASES = [
    pytest.param({"stage": stage, "dtype": dtype}, id=f"stage{stage}-{dtype}", marks=[] if first else ON_DEVICE)
    for stage, dtype, first in (
        (1, "bf16", True), (2, "bf16", False), (3, "bf16", False), (1, "fp16", False), (3, "fp16", False),
    )
]  # fmt: skip
pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def pair() -> Iterator[Crew]:
    made = Crew(2, prepare="one_device.share")
    yield made
    made.close()


@pytest.mark.parametrize("plain", CASES)
def test_a_killed_rank_of_two_on_one_device(pair: Crew, tmp_path: Path, plain: dict[str, Any]) -> None:
    """The other one continues alone, in its loop; a newcomer makes them two again."""
    config = {**plain, "in_loop": True, "url": str(tmp_path / "moved")}
    more: dict[str, Any] = {"batch": BATCH, "max_world_size": 2, "checkpoint_every_steps": 1}
    store = CheckpointStore(str(tmp_path / "moved"), "run")
    pair.begin([0, 1], "one_device.train", {**config, "victim": 1, "at": AT}, **more)
    for number in (0, 1):
        pair.reached(number, "there")
    pair.reached(0, f"committed step {AT}")
    pair.members[1].signal(signal.SIGKILL)
    pair.members[1].process.join()
    pair.abort(0, "rank 1 was lost")
    assert pair.outcome(0).result.kind in ("ended", "collective_failed")
    pair.replace(1)

    alone = pair.run([0], "one_device.train", config, checkpoint=store.list()[0].id, end_at=AT + 2, **more)
    _assert_ended(alone, "ended", AT + 2)
    again = pair.run([1, 0], "one_device.train", config, checkpoint=store.list()[0].id, **more)
    _assert_ended(again, "finished", LAST_STEP)

    survivor = again[1]
    assert survivor.told["calls"] == 1, "its function was called again"
    assert survivor.told["abandoned"] == 1
    assert survivor.told["device"].startswith("cuda" if torch.cuda.is_available() else "cpu")
    assert alone[0].restores[-1].bytes_read == alone[0].restores[-1].bytes_needed > 0
    whole = pair.run([0, 1], "one_device.train", {**plain, "url": str(tmp_path / "still")}, batch=BATCH)
    _assert_ended(whole, "finished", LAST_STEP)
    still, moved = Run(tmp_path / "still", [whole]), Run(tmp_path / "moved", [alone, again])
    late = {name: loss for name, loss in still.losses.items() if int(name.removeprefix("loss ")) > AT}
    assert _distance(late, moved.losses) <= CEILING[plain["dtype"]]
    assert _distance(still.state, moved.state) <= CEILING[plain["dtype"]]
