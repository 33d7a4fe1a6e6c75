"""The allocator's settings, as the installed torch reads them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from elastic.comm.allocator import let_segments_grow

# torch is imported first, as in a worker that was forked by its node's server.
TOLD = """
import os, torch
from elastic.comm.allocator import let_segments_grow
let_segments_grow()
print(torch._C._accelerator_getAllocatorSettings())
"""


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
            {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
        ),
        # A user's way to say: torch's own defaults.
        ({"PYTORCH_ALLOC_CONF": ""}, {"PYTORCH_ALLOC_CONF": ""}),
    ],
)
def test_what_the_environment_sets_is_kept(environment: dict[str, str], wanted: dict[str, str]) -> None:
    let_segments_grow(environment)
    assert environment == wanted


def test_torch_takes_the_setting_after_it_was_imported() -> None:
    """Another name, or a setting that comes too late, would be silent."""
    done = subprocess.run([sys.executable, "-c", TOLD], env={}, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "expandable_segments:True", done.stderr[-2000:]
