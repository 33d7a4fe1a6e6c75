"""DeepSpeed's optimizer kernels: compiled before the first generation, since nvcc takes up to minutes and a join is
limited; and what they keep from one generation to the next."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import torch

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


def forget_powers(optimizer: Any) -> None:
    """On a CPU the kernels of Adam keep the betas to the power of the step, one for the whole process, and multiply
    them on from step to step. A process that begins at a later step takes the power itself, which is rounded otherwise.
    After a step with other betas they take it in every process."""
    # Muon has one inside, for what is no matrix.
    optimizer = getattr(optimizer, "aux_optimizer", None) or optimizer
    kind = next(
        (cls.__name__ for cls in type(optimizer).__mro__ if cls.__module__.startswith("deepspeed.ops.adam")), ""
    )
    tensors = [torch.zeros(1) for _ in range(4)]
    rate, betas, eps, step, decay = 0.0, (0.0, 0.0), 1.0, 1, 0.0
    if kind == "FusedAdam" and optimizer._dummy_overflow_buf.device.type == "cpu":
        lists, mode = [[tensor] for tensor in tensors], optimizer.adam_w_mode
        optimizer.multi_tensor_adam(1, optimizer._dummy_overflow_buf, lists, rate, *betas, eps, step, mode, 1, decay)
    elif kind == "DeepSpeedCPUAdam":
        optimizer.ds_opt_adam.adam_update(optimizer.opt_id, step, rate, *betas, eps, decay, True, *tensors)


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
