"""One micro-batch on its way through the stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from elastic.core.errors import UsageError
from elastic.engines.base import MicroStep

# What a model is called with: by place, and by name.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Pass:
    """`step`: None in an evaluation. `samples`: of the micro-batch, by which all stages know the shapes of what travels
    between them; None: they are told."""

    def __init__(self, read: Callable[[], Any], device: torch.device, step: MicroStep | None = None) -> None:
        self.step = step
        self.samples = None if step is None else step.samples
        self._read, self._device = read, device
        self._content: Any = None

    def arguments(self, labels: bool) -> Arguments:
        """What the model is called with for the whole micro-batch: with `labels` all of it, else what is not labels."""
        content = self._open(whole=labels)
        inputs = content if labels else content[0]
        if isinstance(inputs, Mapping):
            return (), dict(inputs)
        return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}

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

    def _open(self, whole: bool = False) -> Any:
        """(inputs, labels); `whole`: as the batch is."""
        if self._content is None:
            content = self._read()
            # A collator's batch may be one of a class that torch does not know as a mapping.
            content = dict(content) if isinstance(content, Mapping) else content
            if isinstance(content, dict) and "labels" in content and not whole:
                content = ({name: value for name, value in content.items() if name != "labels"}, content["labels"])
            if not whole and (not isinstance(content, (tuple, list)) or len(content) != 2):
                raise UsageError(
                    "a pipeline's batches are pairs (inputs, labels), or mappings with `labels`, this one is a "
                    f"{type(content).__name__}: give a dataset of these, or a collate_fn"
                )
            self._content = tree_map_only(torch.Tensor, lambda each: each.to(self._device), content)
        return self._content
