"""Buffers of the model through padding passes, which must leave no trace in batch norm and the like."""

from __future__ import annotations

import torch


class PaddingBuffers:
    def __init__(self) -> None:
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(self, module: torch.nn.Module) -> None:
        """Before a padding batch's forward passes; its first call counts."""
        if not self._before:
            self._before = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]

    def restore(self) -> None:
        """After the backward. Not earlier, since the backward may run the forward again (activation checkpointing)."""
        with torch.no_grad():
            for buffer, before in self._before:
                buffer.copy_(before)
        self._before.clear()

    def drop(self) -> None:
        self._before.clear()
