"""DeepSpeed alone under torchrun, for as long as its gate lets it: what an undisturbed step costs without this project.

`argv`: size, stage, folder of the marks, gate, seconds that every pass sleeps.
"""

from __future__ import annotations

import sys

from benchmarks import workload
from benchmarks.bodies import deepspeed_alone
from benchmarks.marks import MarkWriter, pass_gate


def main(size: str, stage: str, marks_folder: str, gate: str, elsewhere_s: str) -> None:
    import torch

    engine, batches = deepspeed_alone.make_engine(workload.SIZES[size], int(stage))
    rank, world_size, marks = torch.distributed.get_rank(), torch.distributed.get_world_size(), MarkWriter(marks_folder)
    for step in deepspeed_alone.steps(engine, batches, float(elsewhere_s)):
        marks.step_done(step, rank, world_size, 1)
        pass_gate(gate, step + 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
