"""One worker under torchrun: DeepSpeed, a checkpoint every few steps, and on a restart the newest one, converted.

`argv`: size, stage, folder of the marks, folder of the checkpoints, steps between checkpoints.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks import workload
from benchmarks.bodies import deepspeed_alone
from benchmarks.marks import MarkWriter


def main(size: str, stage: str, marks_folder: str, checkpoints: str, every: str) -> None:
    import torch

    engine, batches = deepspeed_alone.restore(workload.SIZES[size], int(stage), Path(checkpoints))
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    # Another one at every rendezvous, and the same for all of its workers.
    era = int(os.environ["MASTER_PORT"])
    marks = MarkWriter(marks_folder)
    for step in deepspeed_alone.steps(engine, batches):
        marks.step_done(step, rank, world_size, era)
        if step % int(every) == 0:
            deepspeed_alone.save(engine, Path(checkpoints))


if __name__ == "__main__":
    main(*sys.argv[1:])
