"""Entry point of one process: python native_main.py RANK FOLDER CASES. Writes its verdicts as JSON."""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import traceback
from pathlib import Path


def main() -> None:
    rank, folder, module = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
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


if __name__ == "__main__":
    main()
