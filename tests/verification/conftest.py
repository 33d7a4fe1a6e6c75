"""DeepSpeed is imported into the test process here, and it looks at the environment when it is."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
