"""One replica group of torchft: DDP over replicas, as `train_ddp.py` of pytorch/torchft does it.

Started by torchrun with one process per replica group. `argv`: size, folder of the marks.
"""

from __future__ import annotations

import itertools
import os
import sys
from datetime import timedelta
from typing import Any

from benchmarks import workload
from benchmarks.marks import MarkWriter


def main(size_name: str, folder: str) -> None:
    import torch
    from torch.utils.data import DataLoader
    from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo

    size = workload.SIZES[size_name]
    replica, replicas = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])
    model, inner, data = workload.build(size)
    state: dict[str, Any] = {}

    def load_state_dict(saved: dict[str, Any]) -> None:
        state["model"].load_state_dict(saved["model"])
        state["optimizer"].load_state_dict(saved["optimizer"])

    def state_dict() -> dict[str, Any]:
        return {name: part.state_dict() for name, part in state.items()}

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"replica_{replica}",
        timeout=timedelta(seconds=30),
    )
    state["model"] = DistributedDataParallel(manager, model)
    state["optimizer"] = optimizer = Optimizer(manager, inner)
    sampler = DistributedSampler(
        data, replica_rank=replica, num_replica_groups=replicas, group_rank=0, num_replicas=1, shuffle=True
    )
    loader = DataLoader(data, batch_size=size.batch // replicas, sampler=sampler)
    marks = MarkWriter(folder)
    for windows in itertools.chain.from_iterable(itertools.repeat(loader)):
        before = manager.current_step()
        optimizer.zero_grad()
        state["model"](windows).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if manager.current_step() > before:
            # The quorum's number is not public; its size changes with every loss and every return.
            size_now = manager.num_participants()
            marks.step_done(manager.current_step(), manager.participating_rank() or 0, size_now, size_now)


if __name__ == "__main__":
    main(*sys.argv[1:])
