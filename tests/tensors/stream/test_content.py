"""Hashes of samples: every difference of content counts, and where it was read does not."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from elastic.core.errors import UsageError
from elastic.training.data.stream.content import content_hash


@dataclass(frozen=True)
class Record:
    x: int
    y: Any


class Picture:
    """As an image of PIL."""

    mode, size = "L", (2, 1)

    def tobytes(self) -> bytes:
        return b"ab"


class Opaque:
    pass


DIFFERENT: list[Any] = [
    None, True, 1, 1.0, 2**70, "1", b"1", "", b"", [], [1], [1, 2], [12], [[1], 2], [[1, 2]], [1.0], [1.0, 2.0],
    [1, 2.0], [True, 2], [2**70, 1], ["1", "2"], ["12"], (["a"], "b"), (["a", "b"],),
    {}, {"a": 1}, {"a": "1"}, {"b": 1}, {"a": 1, "b": 2},
    np.int64(1), np.array([1, 2]), np.array([1, 2], np.int32), np.array([[1, 2]]), np.array([1.0, 2.0]),
    torch.tensor([1, 2]), torch.tensor([[1, 2]]), torch.tensor([1, 2], dtype=torch.int32), torch.tensor([1.0]),
    torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor(1), torch.empty(0), torch.empty(0, 3),
    torch.tensor([True]), Record(1, None), Record(1, [2]), Picture(),
]  # fmt: skip


def test_every_difference_counts() -> None:
    assert len({content_hash(value) for value in DIFFERENT}) == len(DIFFERENT)


def test_equal_content_has_one_hash() -> None:
    tensor = torch.arange(12).reshape(3, 4)
    assert content_hash(tensor.t()) == content_hash(tensor.t().contiguous())
    array = np.arange(12).reshape(3, 4)
    assert content_hash(array[:, ::2]) == content_hash(array[:, ::2].copy())
    assert content_hash([1, (2, 3)]) == content_hash((1, [2, 3]))
    assert content_hash(bytearray(b"x")) == content_hash(memoryview(b"x")) == content_hash(b"x")
    assert content_hash(float("nan")) == content_hash(float("nan"))


def test_another_process_gives_the_same() -> None:
    code = (
        "import torch; from elastic.training.data.stream.content import content_hash; "
        "print(content_hash({'text': 'ö', 'ids': [1, 2], 'x': torch.ones(2)}))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(found) == content_hash({"text": "ö", "ids": [1, 2], "x": torch.ones(2)})


def test_what_cannot_be_seen_is_refused_or_counts_by_its_type() -> None:
    with pytest.raises(UsageError, match=r"holds a .*Opaque, whose content cannot be compared .* transform="):
        content_hash([Opaque()])
    assert content_hash([Opaque()], strict=False) == content_hash([Opaque()], strict=False)
    with pytest.raises(UsageError, match="Opaque"):
        content_hash(np.array([Opaque()], dtype=object))
