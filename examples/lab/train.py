"""The training function of the lab. Both runs use it: they differ in their DeepSpeed configuration alone."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

import elastic
from lab import classifier, memory, sentences


def train(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = classifier.build(classifier.Shape.of(config), config.get("pretrained"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"], weight_decay=0.01)
    engine, _, loader, _ = elastic.initialize(model=model, optimizer=optimizer, training_data=_data(config))
    log = SyncLog(engine, config)
    for ids, labels in loader:
        log.begin()
        with log.phase("forward"):
            loss = engine(ids.to(engine.device), labels.to(engine.device))
        with log.phase("backward"):
            engine.backward(loss)
        log.note_memory()
        with log.phase("step"):
            engine.step()
        log.end()


def _data(config: Mapping[str, Any]) -> TensorDataset:
    """`config["data"]` is the file that the lab has written. Without it: the sentences that are made by rules."""
    if "data" in config:
        data = json.loads(Path(config["data"]).read_text(encoding="utf-8"))
        ids, labels = data["ids"], data["labels"]
    else:
        found = sentences.made(config["sentences"])
        ids = [sentences.encode(text, config["length"], config["vocabulary"]) for text in found.texts]
        labels = found.labels
    return TensorDataset(torch.tensor(ids), torch.tensor(labels))


class SyncLog:
    """What the collectives of `config["watched_steps"]` did, and what each rank held then, as lines of JSON in
    `config["folder"]`. Seconds count from the step's first forward pass."""

    def __init__(self, engine: Any, config: Mapping[str, Any]) -> None:
        self._engine, self._stage = engine, engine.zero_optimization_stage()
        self._folder, self._steps = config.get("folder"), set(config.get("watched_steps", ()))
        self._at: tuple[int, int] | None = None
        self._memory: dict[str, int] | None = None
        if self._folder is not None:
            engine.watch_collectives(lambda call: self._calls.append(asdict(call)))
        self._forget()

    def _forget(self) -> None:
        self._began_s = time.perf_counter()
        self._calls: list[dict[str, Any]] = []
        self._phases: list[tuple[str, float, float]] = []
        self._memory = None

    def begin(self) -> None:
        """Of a micro-batch. A step that was abandoned is done by another generation: all of it, or its rest."""
        now = elastic.get_context()
        if self._at != (now.generation, now.step):
            self._at = (now.generation, now.step)
            self._forget()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began_s = time.perf_counter()
        yield
        self._phases.append((name, began_s - self._began_s, time.perf_counter() - self._began_s))

    def note_memory(self) -> None:
        """After a step's first backward pass, from the second step of a generation on: Adam has its moments then."""
        if self._watched() and self._memory is None and not elastic.get_context().abandoned:
            self._memory = memory.held_bytes(self._engine, self._stage)

    def end(self) -> None:
        """Of a micro-batch; where it has ended its step, the line is written."""
        now = elastic.get_context()
        if self._watched() and self._at is not None and self._at == (now.generation, now.step - 1):
            line: dict[str, Any] = {"step": now.step, "generation": now.generation, "world_size": now.world_size}
            line |= {"rank": now.rank, "stage": self._stage, "memory": self._memory}
            if now.rank == 0:
                line |= {"phases": self._phases, "calls": [self._relative(call) for call in self._calls]}
            with open(Path(str(self._folder), f"sync-rank{now.rank}.jsonl"), "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def _watched(self) -> bool:
        return self._folder is not None and self._at is not None and self._at[1] + 1 in self._steps

    def _relative(self, call: dict[str, Any]) -> dict[str, Any]:
        return {**call, "began_s": call["began_s"] - self._began_s}
