"""One process of `native_processes`. Writes its verdicts as JSON, and what it says into a log."""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import traceback
from pathlib import Path


def main(rank: int, folder: Path, module: str) -> None:
    with (folder / f"log-{rank}").open("w") as log:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(log.fileno(), stream.fileno())
    import torch

    torch.set_num_threads(1)
    import deepspeed
    import deepspeed.ops

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # Compiled at first use, which takes a minute, and used by inference only.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    verdicts: dict[str, str] = {}
    report = folder / f"verdicts-{rank}.json"
    for name, run in importlib.import_module(module).CASES.items():
        try:
            run(rank, folder)
            verdicts[name] = ""
        except BaseException:  # noqa: BLE001 - the traceback is the verdict; the other processes cannot continue either
            verdicts[name] = traceback.format_exc()
            report.write_text(json.dumps(verdicts))
            os._exit(1)
        report.write_text(json.dumps(verdicts))
