from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.checkpoint import digest as digest_module
from elastic.checkpoint import hashing as module
from elastic.checkpoint.digest import digest, digest_rows, partial_digests
from elastic.checkpoint.shards import DTYPE_NAMES
from elastic.core.sharding.layout import Chunk, RankLayout
from elastic.core.sharding.zero import zero3_layout, zero12_layout
from elastic.training.state import digest_reader, verify_weights

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


def values(count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw % 2 == 0 if dtype is torch.bool else raw.view(dtype)


def test_never_changes() -> None:
    # Printed once: a newer release must verify it, too.
    assert digest(torch.arange(5.0), "fp32/w") == 9614092307833815040
    assert digest(torch.arange(5, dtype=torch.bfloat16), "fp32/w", 70000) == 17188821286573969984
    assert digest(torch.arange(5), "fp32/w") == 14097483341604635568
    assert digest(torch.arange(5, dtype=torch.float64), "fp32/w") == 18421933956969005056


def test_follows_its_formula() -> None:
    words = values(1000, torch.int32).tolist()
    table, _ = module._table()
    seed = module._seed("torch.int32", "k/n")
    first = module.BLOCK - 300  # over the end of a block
    expected = sum(
        (word + module.OFFSET) * int(table[i % module.BLOCK]) * module._factor(seed, i // module.BLOCK)
        for i, word in enumerate(words, first)
    )
    assert digest(values(1000, torch.int32), "k/n", first) == expected % 2**64


@given(data=st.data(), dtype=st.sampled_from(DTYPES), width=st.sampled_from([0, 1, 3, 50, 33_000, 70_000]))
def test_rows_have_the_digest_of_what_they_are_rows_of(data: st.DataObject, dtype: torch.dtype, width: int) -> None:
    rows = data.draw(st.integers(1, 5 if width > 1000 else 3000))
    stride = width + data.draw(st.sampled_from([0, 1, 7, 100_000 if rows < 100 else 64]))
    start = data.draw(st.integers(0, 70_000))
    tensor = values(rows * width, dtype)
    expected = sum(digest(own, "k/n", start + row * stride) for row, own in enumerate(tensor.view(rows, width)))
    assert digest_rows(tensor, "k/n", start, rows, stride) == expected % 2**64


@given(dtype=st.sampled_from(DTYPES), count=st.integers(1, 300), start=st.integers(0, 70_000), shift=st.integers(0, 7))
def test_bytes_anywhere_in_memory_have_the_tensors_digest(
    dtype: torch.dtype, count: int, start: int, shift: int
) -> None:
    tensor = values(count, dtype)
    raw = bytes(shift) + tensor.view(torch.uint8).numpy().tobytes()
    expected = digest(tensor, "k/n", start)
    assert module.digest_bytes(memoryview(raw)[shift:], DTYPE_NAMES[dtype], "k/n", start) == expected
    assert by_torch(tensor, "k/n", start) == expected


def by_torch(tensor: torch.Tensor, name: str, start: int) -> int:
    """The formula once more, by torch's own arithmetic."""
    parts = torch.view_as_real(tensor).flatten() if tensor.is_complex() else tensor
    size = parts.element_size()
    words = parts.view(torch.uint8 if size == 1 else torch.int16 if size == 2 else torch.int32).to(torch.int64)
    table, _ = module._table()
    seed = module._seed(str(tensor.dtype), name)
    total = 0
    for i, word in enumerate(words.tolist(), start * words.numel() // tensor.numel()):
        place = int(table[i % module.BLOCK])
        total += (word + module.OFFSET) * place * module._factor(seed, i // module.BLOCK)
    return total % 2**64


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 3, module.BLOCK - 1, module.BLOCK, 5 * module.BLOCK + 7])
def test_a_device_computes_the_same(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, count: int) -> None:
    monkeypatch.setattr(digest_module, "_BLOCKS_AT_ONCE", 2)
    tensor = values(count, dtype)
    assert digest_module.digest_on_device(tensor, "k/n") == digest(tensor, "k/n")
    assert digest_module.digest_on_device(tensor[None].expand(2, -1).T[:, 0], "k/n") == digest(tensor, "k/n")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", [1, 3, 65_535, 65_536, 70_001])
def test_a_device_computes_the_digest_of_a_piece_from_any_place(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, start: int
) -> None:
    monkeypatch.setattr(digest_module, "_BLOCKS_AT_ONCE", 2)
    for count in (0, 1, 40, 200_003):
        tensor = values(count, dtype)
        assert digest_module.digest_on_device(tensor, "k/n", start) == digest(tensor, "k/n", start), count


def test_all_pieces_of_a_device_come_to_the_host_in_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = [Chunk("a", 0, 5, "buffer", 0), Chunk("a", 5, 70_000, "buffer", 5), Chunk("b", 9, 11, "buffer", 70_005)]
    tensors = {"fp32/buffer": values(70_020, torch.float32), "exp_avg/buffer": values(70_020, torch.float32)}
    on_host = digest_reader.digests(chunks, tensors.items())
    transfers: list[int] = []
    unsigned = digest_module.unsigned
    monkeypatch.setattr(digest_reader, "_reads_itself", lambda tensor: True)

    def transfer(totals: list[torch.Tensor]) -> list[int]:
        transfers.append(len(totals))
        return unsigned(totals)

    monkeypatch.setattr(digest_reader, "unsigned", transfer)
    assert digest_reader.digests(chunks, tensors.items()) == on_host
    assert transfers == [6]


def test_fingerprints_of_a_device_come_to_the_host_in_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.arange(5.0), torch.empty(0), torch.arange(5.0), torch.arange(6.0)]
    transfers: list[int] = []
    unsigned = digest_module.unsigned
    monkeypatch.setattr(verify_weights, "_hashes_itself", lambda tensor: True)

    def transfer(totals: list[torch.Tensor]) -> list[int]:
        transfers.append(len(totals))
        return unsigned(totals)

    monkeypatch.setattr(verify_weights, "unsigned", transfer)
    found = verify_weights.fingerprints(tensors)
    assert transfers == [3]
    assert found[0] == found[2] != found[3]
    assert found[1] == 0


# A second of the start of every agent, every controller and every command.
@pytest.mark.parametrize(
    "name",
    [
        "elastic.checkpoint.hashing",
        "elastic.runtime.controller.actor",
        "elastic.runtime.node.agent",
        "elastic_jobs.submit.supervisor_actor",
    ],
)
def test_who_does_not_train_needs_no_torch(name: str) -> None:
    code = f"import sys, {name}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@given(data=st.data(), dtype=st.sampled_from(DTYPES), count=st.integers(1, 300), start=st.integers(0, 200_000))
def test_does_not_depend_on_the_cut(data: st.DataObject, dtype: torch.dtype, count: int, start: int) -> None:
    tensor = values(count, dtype)
    cuts = sorted({0, count, *data.draw(st.lists(st.integers(0, count), max_size=5))})
    parts = [digest(tensor[low:high], "fp32/w", start + low) for low, high in pairwise(cuts)]
    assert sum(parts) % 2**64 == digest(tensor, "fp32/w", start)


@pytest.mark.parametrize("dtype", DTYPES)
def test_does_not_depend_on_the_cut_across_blocks(dtype: torch.dtype) -> None:
    tensor = values(200_003, dtype)
    for cuts in ([0, 1, 200_003], [0, 65_536, 131_072, 200_003], [0, 65_535, 65_537, 199_999, 200_003]):
        parts = [digest(tensor[low:high], "fp32/w", low) for low, high in pairwise(cuts)]
        assert sum(parts) % 2**64 == digest(tensor, "fp32/w")


@pytest.mark.parametrize("world", [1, 2, 3, 7, 12])
def test_layouts_of_all_kinds_agree(world: int) -> None:
    group = [("a", 101), ("one", 1), ("b", 4096), ("seven", 7)]
    whole = {name: values(numel, seed=number) for number, (name, numel) in enumerate(group)}
    expected = {f"fp32/{name}": digest(tensor, f"fp32/{name}") for name, tensor in whole.items()}
    for layout in (
        zero12_layout([group], world),
        zero12_layout([group], world, round_robin=True),
        zero3_layout([group], world, 50),
    ):
        total = dict.fromkeys(expected, 0)
        for rank in layout.ranks:
            tensors = {f"fp32/{buffer}": torch.full((length,), float("nan")) for buffer, length in rank.buffers.items()}
            for chunk in rank.chunks:
                part = whole[chunk.name][chunk.start : chunk.stop]
                tensors[f"fp32/{chunk.buffer}"][chunk.offset : chunk.offset + chunk.numel] = part
            for key, partial in partial_digests(rank, tensors).items():
                total[key] = (total[key] + partial) % 2**64
        assert total == expected


def test_padding_is_not_looked_at() -> None:
    layout = RankLayout((Chunk("w", 0, 3, "g", 1),), {"g": 6})
    one, two = torch.tensor([9.0, 1, 2, 3, 9, 9]), torch.tensor([float("nan"), 1, 2, 3, 0, -1])
    assert partial_digests(layout, {"fp32/g": one}) == partial_digests(layout, {"fp32/g": two})


# Mutations: what must show, each applied to a tensor of normal numbers.
def swapped(tensor: torch.Tensor, i: int, j: int) -> torch.Tensor:
    changed = tensor.clone()
    changed[i], changed[j] = tensor[j], tensor[i]
    return changed


def with_element(tensor: torch.Tensor, i: int, value: float) -> torch.Tensor:
    changed = tensor.clone()
    changed[i] = value
    return changed


NORMAL = torch.randn(70_001, generator=torch.Generator().manual_seed(1))

MUTATIONS = {
    "two neighbours swapped": lambda t: swapped(t, 10, 11),
    "swapped one block apart": lambda t: swapped(t, 3, 3 + 65_536),
    "reversed": lambda t: t.flip(0),
    "rolled by one": lambda t: t.roll(1),
    "blocks exchanged": lambda t: torch.cat([t[65_536:], t[:65_536]]),
    "transposed": lambda t: t[:65_536].view(256, 256).t().flatten(),
    "cast through bf16": lambda t: t.to(torch.bfloat16).float(),
    "one element of another step": lambda t: with_element(t, 5, float(t[5]) * (1 + 2**-23)),
    "truncated by one": lambda t: t[:-1],
    "one zero more": lambda t: torch.cat([t, torch.zeros(1)]),
    "sign of one": lambda t: with_element(t, 7, -float(t[7])),
    "two signs": lambda t: with_element(with_element(t, 7, -float(t[7])), 8, -float(t[8])),
    "all signs": lambda t: -t,
    "tail not sent": lambda t: torch.cat([t[:-3], torch.zeros(3)]),
    "applied twice": lambda t: t + t,
    "other dtype": lambda t: t.double(),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sees(mutation: str, dtype: torch.dtype) -> None:
    tensor = NORMAL.to(dtype)
    if mutation == "other dtype" and dtype is torch.float64:
        changed = tensor.float()
    elif mutation == "one element of another step":
        changed = with_element(tensor, 5, float(tensor[5]) * (1 + torch.finfo(dtype).eps))
    else:
        changed = MUTATIONS[mutation](tensor).to(torch.float64 if mutation == "other dtype" else dtype)
    assert digest(changed.contiguous(), "fp32/w") != digest(tensor, "fp32/w")


def test_sees_exchanged_tensors() -> None:
    one, two = values(100, seed=1), values(100, seed=2)
    layout = RankLayout((Chunk("w", 0, 100, "g", 0), Chunk("v", 0, 100, "h", 0)), {"g": 100, "h": 100})
    here = partial_digests(layout, {"exp_avg/g": one, "exp_avg_sq/g": two, "fp32/g": one, "fp32/h": two})
    kinds = partial_digests(layout, {"exp_avg/g": two, "exp_avg_sq/g": one, "fp32/g": one, "fp32/h": two})
    names = partial_digests(layout, {"exp_avg/g": one, "exp_avg_sq/g": two, "fp32/g": two, "fp32/h": one})
    assert {key for key in here if here[key] != kinds[key]} == {"exp_avg/w", "exp_avg_sq/w"}
    assert {key for key in here if here[key] != names[key]} == {"fp32/w", "fp32/v"}
    assert len(set(here.values())) == 4


def test_sees_what_zero_hides() -> None:
    zeros = {
        digest(torch.zeros(5), "fp32/w"),
        digest(-torch.zeros(5), "fp32/w"),
        digest(torch.zeros(6), "fp32/w"),
        digest(torch.zeros(5), "fp32/w", 1),
        digest(torch.zeros(5, dtype=torch.bfloat16), "fp32/w"),
        digest(torch.zeros(5, dtype=torch.int32), "fp32/w"),
        digest(torch.zeros(5), "exp_avg/w"),
        0,
    }
    assert len(zeros) == 8


@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_sees_any_one_changed_bit(data: st.DataObject, dtype: torch.dtype) -> None:
    raw = values(50, dtype).view(torch.uint8).clone()
    place = data.draw(st.integers(0, raw.numel() - 1))
    changed = raw.clone()
    changed[place] ^= 1 if dtype is torch.bool else 1 << data.draw(st.integers(0, 7))
    assert digest(changed.view(dtype), "fp32/w") != digest(raw.view(dtype), "fp32/w")


def test_values_do_not_collide() -> None:
    # 60,000 different values in one place: 2**64 digests have no reason to coincide.
    found = {digest(torch.tensor([number], dtype=torch.int32), "k/n", 17) for number in range(-30_000, 30_000)}
    assert len(found) == 60_000
