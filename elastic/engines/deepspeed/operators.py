"""Compile DeepSpeed's optimizer kernels before the first generation: nvcc takes up to minutes, a join is limited."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)


def needed(config: Mapping[str, Any]) -> str | None:
    """The builder of the kernels that this configuration's optimizer uses, as DeepSpeed 0.19.8 chooses it.

    None for torch's own optimizers, and where the script passes its optimizer: the configuration does not say then.
    """
    optimizer = config.get("optimizer") or {}
    kind = str(optimizer.get("type", "")).lower()
    offload = ((config.get("zero_optimization") or {}).get("offload_optimizer") or {}).get("device", "none") != "none"
    if kind in ("adam", "adamw", "muon"):
        if (optimizer.get("params") or {}).get("torch_adam"):
            return None
        return "CPUAdamBuilder" if offload else "FusedAdamBuilder"
    if kind == "lion":
        return "CPULionBuilder" if offload else "FusedLionBuilder"
    if kind == "adagrad":
        return "CPUAdagradBuilder" if offload else None
    return "FusedLambBuilder" if kind == "lamb" else None


def build_ahead(config: Mapping[str, Any] | None) -> None:
    """Build and load them. A failure is logged: DeepSpeed raises it again when the optimizer is made."""
    name = needed(config or {})
    if name is None:
        return
    from deepspeed.accelerator import get_accelerator

    began = time.monotonic()
    try:
        builder = get_accelerator().create_op_builder(name)
        if builder is not None:
            builder.load(verbose=False)
    except Exception as error:  # noqa: BLE001 - a compiler's failure may be anything
        logger.warning("%s could not be built ahead: %s: %s", name, type(error).__name__, error)
        return
    logger.info("%s is ready after %.1f s", name, time.monotonic() - began)
