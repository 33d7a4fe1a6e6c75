"""One micro-batch on its way through the stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from elastic.core.errors import UsageError
from elastic.engines.base import MicroStep


class Pass:
    """`step`: None in an evaluation. `samples`: of the micro-batch, by which all stages know the shapes of what travels
    between them; None: they are told."""

    def __init__(self, read: Callable[[], Any], device: torch.device, step: MicroStep | None = None) -> None:
        self.step = step
        self.samples = None if step is None else step.samples
        self._read, self._device = read, device
        self._content: Any = None

    def take_inputs(self) -> tuple[Any, ...]:
        """For the first stage, once."""
        inputs, labels = self._open()
        # They are not needed any more.
        self._content = (None, labels)
        return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)

    def take_labels(self) -> Any:
        """For the last stage, once."""
        _, labels = self._open()
        self._content = None
        return labels

    def _open(self) -> tuple[Any, Any]:
        if self._content is None:
            content = self._read()
            if not isinstance(content, (tuple, list)) or len(content) != 2:
                raise UsageError(
                    f"a pipeline's batches are pairs (inputs, labels), this one is a {type(content).__name__}: give "
                    "a dataset of pairs, or a collate_fn"
                )
            self._content = tree_map_only(torch.Tensor, lambda each: each.to(self._device), tuple(content))
        inputs, labels = self._content
        return inputs, labels
