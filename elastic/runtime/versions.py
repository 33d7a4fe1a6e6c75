"""Library versions, as written into manifests."""

from __future__ import annotations

import platform
from importlib import metadata


def versions() -> dict[str, str]:
    packages = ("ray-elastic", "ray", "torch", "deepspeed", "safetensors")
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in packages}}
