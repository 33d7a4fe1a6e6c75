"""Random numbers that depend on the place in the run, never on the rank or the world size.

Every stream is named by parts, for example `(seed, "forward", step, micro_batch, 0)`. Seeding costs some 30 us.
"""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def derive(*parts: int | str) -> int:
    """A 63-bit seed from the parts; equal parts give equal seeds on every platform and Python build.

    Not `hash()`, which is salted per process for strings.
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_everything(*parts: int | str) -> None:
    """Seed torch (CPU and every visible device), numpy and `random` of this process with the stream `parts`."""
    value = derive(*parts)
    torch.manual_seed(value)
    # numpy takes 32 bits only.
    np.random.seed(value & 0xFFFFFFFF)
    random.seed(value)
