"""A training function over a streamed, packed corpus, for the tests of runs on Ray; steered as those of `loops`."""

from __future__ import annotations

import random
from typing import Any

import loops
import torch
from torch import nn

import elastic
from elastic.core.data.readers import Slots
from elastic.training.data.stream.reader import Reader
from elastic.training.data.stream.spec import Stream

FILES, DOCUMENTS = 6, 20
GLOBAL_BATCH, MICRO_BATCH = 10, 2
TOKENS, VOCABULARY = 8, 256


def corpus() -> dict[str, str]:
    """Path and text of each file. Every document begins with two tokens that no other one has in this order."""
    lengths = random.Random(5)
    return {
        f"part-{file}.jsonl": "".join(
            f'{{"id": [{100 + file}, {number + 1}], "length": {lengths.randrange(1, 14)}}}\n'
            for number in range(DOCUMENTS)
        )
        for file in range(FILES)
    }


def tokens(document: dict[str, Any]) -> list[int]:
    """Random tokens after the two: the same ones whoever reads the document, and whenever."""
    return [*document["id"], *torch.randint(130, VOCABULARY, (document["length"],)).tolist()]


def stream(url: str) -> Stream:
    return elastic.data.stream(
        elastic.data.jsonl(url), shuffle_window=6, transform=tokens, pack=elastic.data.Pack(TOKENS, eos=0)
    )


def train(config: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Dropout(0.1), nn.Linear(8, VOCABULARY))
    engine, _, loader, _ = elastic.initialize(
        model=model,
        training_data=stream(config["corpus"]),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.02),
        config=loops.deepspeed_config(config),
        num_workers=2,
        prefetch_factor=2,
    )
    loops.between_steps(config, loops.Numbers(0, torch.float32))
    for _ in elastic.epochs():
        for batch in loader:
            loss = nn.functional.cross_entropy(engine(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            engine.backward(loss)
            engine.step()


def _readers(url: str) -> list[Reader]:
    readers = Slots(GLOBAL_BATCH, MICRO_BATCH).readers
    return [Reader(stream(url).parts, 0, number, readers) for number in range(readers)]


def oracle_of_epochs(url: str, epochs: int) -> tuple[dict[int, str], dict[int, int]]:
    """The sum and the number of samples of every step, as one process reads them. The readers end in other steps."""
    sums: dict[int, str] = {}
    sizes: dict[int, int] = {}
    readers = _readers(url)
    for epoch in range(epochs):
        while any(taken := [len(reader.take(MICRO_BATCH, epoch)) for reader in readers]):
            step = len(sums) + 1
            parts = [reader.sum for reader, size in zip(readers, taken, strict=True) if size]
            sums[step], sizes[step] = f"{sum(parts) % 2**64:016x}", sum(taken)
    return sums, sizes


def oracle(url: str, steps: int) -> tuple[dict[int, str], dict[int, list[int]]]:
    """The sum of every step, and all tokens by reader, as one process reads them that nothing happens to."""
    slots = Slots(GLOBAL_BATCH, MICRO_BATCH)
    readers = _readers(url)
    sums: dict[int, str] = {}
    read: dict[int, list[int]] = {reader.number: [] for reader in readers}
    for step in range(1, steps + 1):
        for reader in readers:
            for sample in reader.read(reader.count, slots.size(reader.number)):
                read[reader.number] += sample.tolist()
        sums[step] = f"{sum(reader.sum for reader in readers) % 2**64:016x}"
    return sums, read
