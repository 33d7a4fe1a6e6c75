"""Shared sequences where each rank has its own: the functions are plain ones. With others: tests/processes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from elastic.core.errors import UsageError
from elastic.training.user import sequence


def test_without_a_generation_each_rank_has_whole_sequences() -> None:
    assert (sequence.size(), sequence.rank(), sequence.group()) == (1, 0, None)
    tokens = torch.arange(12).reshape(2, 6)
    assert sequence.split(tokens) is tokens
    assert sequence.gather(tokens) is tokens
    query, key, value = torch.randn(3, 2, 4, 6, 8).unbind(0)
    assert torch.equal(
        sequence.attention(scaled_dot_product_attention, query, key, value, is_causal=True),
        scaled_dot_product_attention(query, key, value, is_causal=True),
    )


def test_what_is_gathered_has_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SimpleNamespace(scope=SimpleNamespace(spec=SimpleNamespace(sp=2)))
    monkeypatch.setattr(sequence.context, "current", lambda: shared)
    with pytest.raises(UsageError, match=r"gather was given a tensor that needs a gradient"):
        sequence.gather(torch.ones(1, 4, requires_grad=True))


def test_tokens_are_counted_exactly_in_half_precision() -> None:
    total = torch.tensor(4096.0, dtype=torch.bfloat16)
    assert sequence.mean(total, 4095).item() == torch.tensor(4096 / 4095).item()
    assert sequence.mean(total, torch.tensor(4095)).item() == torch.tensor(4096 / 4095).item()
    assert sequence.mean(torch.tensor(0.0), 0).item() == 0.0
    assert sequence.mean(torch.tensor(3.0, dtype=torch.float64), 2).dtype == torch.float64
