"""A rank that waits for a peer while its groups are made can be released: over gloo here, over NCCL on a device.

Expected with NCCL: with an absent peer the rank stands at the generation's store (`await_all`), before NCCL is asked
for anything. With one that has stopped just before its communicator it stands in the bootstrap, in the first
collective or its synchronisation, and the abort releases it within `abort_timeout_s` (30 s with GPUs).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from elastic.core.settings import GPU_FAILURES

LIMIT_S = 150.0
ON_DEVICE = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.mark.parametrize("peer", ["absent", "stopped"])
@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=ON_DEVICE)])
def test_a_rank_without_its_peer_is_released_by_an_abort(backend: str, peer: str) -> None:
    command = [sys.executable, str(Path(__file__).with_name("lone_rank.py")), backend, peer]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["stood"], "it has not waited for its peer"
    assert told["out"], told
    assert len(told["raised"]) == 1, told
    if backend == "nccl":
        assert ("await_all" in told["stood"]) == (peer == "absent"), told
        assert told["abort_s"] <= GPU_FAILURES["abort_timeout_s"], told
