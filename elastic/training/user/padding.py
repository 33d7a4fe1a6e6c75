"""Buffers of the model through padding passes, which must leave no trace in batch norm and the like."""

from __future__ import annotations

import torch


class PaddingBuffers:
    def __init__(self) -> None:
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(self, *modules: torch.nn.Module) -> None:
        """Before a padding batch's forward passes through these modules; of each the first call counts."""
        for buffer in (buffer for module in modules for buffer in module.buffers()):
            if id(buffer) not in self._before:
                self._before[id(buffer)] = buffer, buffer.detach().clone()

    def restore(self) -> None:
        """After the backward. Not earlier, since the backward may run the forward again (activation checkpointing)."""
        with torch.no_grad():
            for buffer, before in self._before.values():
                buffer.copy_(before)
        self._before.clear()

    def drop(self) -> None:
        self._before.clear()
