"""How fast a streamed, packed corpus is read: alone, beside training, and by torchdata's StatefulDataLoader."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

import elastic
from benchmarks.alone import live
from benchmarks.figures import Figure, Target, not_measured, ratio, statistic
from benchmarks.options import Options
from elastic.core.data.step_plan import StepPlan
from elastic.training.data.stream.loading import StreamReader, stream_reader
from elastic.training.data.stream.spec import Stream

CASE, NAME = "data", "tokens read, loader alone"
GLOBAL_BATCH, MICRO_BATCH, TOKENS, VOCABULARY, WINDOW, PROCESSES = 32, 4, 1024, 50_000, 256, 2
READERS = GLOBAL_BATCH // MICRO_BATCH
PEER = "torchdata StatefulDataLoader"


def measure(options: Options) -> list[Figure]:
    folder = options.make_folder("corpus")
    _write(folder, documents=options.pick(4000, 400))
    corpus, steps = _corpus(folder), options.pick(60, 6)
    note = f"{TOKENS} tokens a sample, windows of {WINDOW} documents, JSONL on a local disk, {PROCESSES} processes"
    alone = Figure(CASE, NAME, "tokens/s", _alone(corpus, steps, options.pick(5, 1)), notes=(note,))
    try:
        values = _peer(folder, steps, options.pick(5, 1))
        peer = Figure(CASE, NAME, "tokens/s", values, PEER, notes=("packed alike, not shuffled",))
    except ImportError as error:
        peer = not_measured(CASE, NAME, "tokens/s", str(error), subject=PEER)
    over = ratio(CASE, "tokens read over the peer's", alone, peer)
    return [alone, peer, over, *_training(folder, options), *_states(corpus)]


def _write(folder: Path, documents: int) -> None:
    draw = random.Random(3)
    for number in range(READERS):
        lines = (
            [draw.randrange(VOCABULARY) for _ in range(draw.randrange(50, 800))] for _ in range(documents // READERS)
        )
        (folder / f"part-{number}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def _corpus(folder: Path) -> Stream:
    pack = elastic.data.Pack(TOKENS, eos=0)
    return elastic.data.stream(elastic.data.jsonl(str(folder)), shuffle_window=WINDOW, pack=pack)


def _opened(corpus: Stream, processes: int) -> tuple[StepPlan, StreamReader]:
    plan = StepPlan(GLOBAL_BATCH, MICRO_BATCH, 1, 0, None, None, READERS, stream=corpus.facts)
    factor = 4 if processes else None
    return plan, stream_reader(corpus.parts, plan, 0, 0, None, None, num_workers=processes, prefetch_factor=factor)


def _alone(corpus: Stream, steps: int, repetitions: int) -> tuple[float, ...]:
    found = []
    for _ in range(repetitions):
        plan, reader = _opened(corpus, PROCESSES)
        _read(plan, reader, 0)
        began = time.perf_counter()
        for step in range(1, steps + 1):
            _read(plan, reader, step)
        found.append(steps * GLOBAL_BATCH * TOKENS / (time.perf_counter() - began))
        reader.close()
    return tuple(found)


def _read(plan: StepPlan, reader: StreamReader, step: int) -> None:
    batches = plan.deal(step)
    for number in range(len(batches)):
        reader.read(batches, number)


class _Packed(torch.utils.data.IterableDataset[torch.Tensor]):
    """The peer's data: the same files, packed alike, with the state that StatefulDataLoader asks for."""

    def __init__(self, folder: str) -> None:
        self._files, self._given = elastic.data.jsonl(folder), 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self._given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._given = state["given"]

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = torch.utils.data.get_worker_info()
        share = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        pending: list[int] = []
        while True:
            for document in self._files(*share):
                pending += [*document, 0]
                while len(pending) >= TOKENS:
                    self._given += 1
                    yield torch.tensor(pending[:TOKENS])
                    pending = pending[TOKENS:]


def _peer(folder: Path, steps: int, repetitions: int) -> tuple[float, ...]:
    """Raises ImportError where torchdata is not installed."""
    kind: Any = import_module("torchdata.stateful_dataloader").StatefulDataLoader
    found = []
    for _ in range(repetitions):
        loader = kind(_Packed(str(folder)), batch_size=MICRO_BATCH, num_workers=PROCESSES, prefetch_factor=4)
        batches = iter(loader)
        for _ in range(READERS):
            next(batches)
        began = time.perf_counter()
        for _ in range(steps * READERS):
            next(batches)
        found.append(steps * GLOBAL_BATCH * TOKENS / (time.perf_counter() - began))
        del batches
    return tuple(found)


def _train(config: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    engine, _, loader, _ = elastic.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        training_data=_corpus(Path(config["corpus"])),
        num_workers=PROCESSES,
        prefetch_factor=4,
        config={
            "train_batch_size": GLOBAL_BATCH,
            "train_micro_batch_size_per_gpu": MICRO_BATCH,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
        },
    )
    for batch in loader:
        engine.backward(engine(batch).square().mean())
        engine.step()


def _training(folder: Path, options: Options) -> list[Figure]:
    steps = options.pick(40, 5)
    lived = live(1, _train, {"corpus": str(folder)}, options.make_folder("run"), end_at=steps)
    # The first steps also wait for the processes to start.
    later = lived.steps[3:]
    waits = tuple(step.data_wait_s / step.duration_s for step in later)
    rates = tuple(step.tokens / step.duration_s for step in later)
    return [
        Figure(CASE, "tokens trained on, beside loading", "tokens/s", rates, notes=("one rank, a small model",)),
        Figure(CASE, "share of a step spent waiting for data", "", waits, targets=(Target("median", 0.02),)),
    ]


def _states(corpus: Stream) -> list[Figure]:
    plan, reader = _opened(corpus, 0)
    _read(plan, reader, 0)
    seconds = []
    for _ in range(200):
        began = time.perf_counter()
        states = reader.states()
        seconds.append(time.perf_counter() - began)
    assert states is not None
    sizes = tuple(float(len(json.dumps(state))) for state in states.states.values())
    began = time.perf_counter()
    resumed = stream_reader(corpus.parts, plan, 0, 1, states, None)
    _read(plan, resumed, 1)
    again_s = time.perf_counter() - began
    return [
        Figure(CASE, f"state of {READERS} readers", "ms", (1e3 * statistic(seconds, "median"),),
               targets=(Target("median", 0.1),)),
        Figure(CASE, "state of a reader", "bytes", sizes, targets=(Target("max", 1024.0),)),
        Figure(CASE, f"resume of {READERS} readers and a step", "s", (again_s,)),
    ]  # fmt: skip
