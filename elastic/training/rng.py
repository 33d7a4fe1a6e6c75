"""Random streams that depend on the position in the run, never on the rank or the world size.

Every stream is named by parts, for example `(seed, "forward", step, micro_batch, 0)`. Seeding the host costs 15 us.
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


def forward_stream(seed: int, step: int, batch: int, number: int, sequence: int = 0) -> tuple[int | str, ...]:
    """The name of the random stream of the forward pass `number` over micro-batch `batch` of a step; of part `sequence`
    where ranks share sequences, so that no two parts have the same dropout."""
    name = (seed, "forward", step, batch, number)
    return (*name, "sequence", sequence) if sequence else name


def layer_stream(seed: int, step: int, batch: int, layer: int, sequence: int = 0) -> tuple[int | str, ...]:
    """The name of the random stream of one layer of a pipeline, which may begin on any rank."""
    return (*forward_stream(seed, step, batch, 0, sequence), "layer", layer)


def seed_everything(*parts: int | str) -> None:
    """Seed torch (CPU and every visible device), numpy and `random` of this process with the stream `parts`."""
    value = seed_host(*parts)
    if torch.version.cuda is not None:
        # torch applies it at the first use of the device.
        torch.cuda.manual_seed_all(value)


def seed_host(*parts: int | str) -> int:
    """The same without the devices: for reading data. Returns the seed.

    `torch.manual_seed` would do it too, but takes fifty times as long: it looks at every kind of device.
    """
    value = derive(*parts)
    torch.default_generator.manual_seed(value)
    # numpy takes 32 bits only.
    np.random.seed(value & 0xFFFFFFFF)
    random.seed(value)
    return value
