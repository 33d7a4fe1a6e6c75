"""Token ids and labels, made of the index alone, as data of small language models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Text = tuple[torch.Tensor, torch.Tensor]


class Texts(torch.utils.data.Dataset[Any]):
    """`text` makes one of its index. `given` are the indices that it was asked for."""

    def __init__(self, text: Callable[[int], Text], size: int, given: list[int] | None = None) -> None:
        self.text, self.size = text, size
        self.given: list[int] = [] if given is None else given

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Text:
        self.given.append(index)
        return self.text(index)


def tokens(generator: torch.Generator, vocabulary: int, length: int) -> Text:
    """Token ids and the next ones."""
    found = torch.randint(0, vocabulary, (length + 1,), generator=generator)
    return found[:-1], found[1:].clone()
