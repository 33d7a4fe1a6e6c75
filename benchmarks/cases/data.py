"""How fast a streamed, packed corpus is read: alone, next to training, and by torchdata's StatefulDataLoader."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

import elastic
from benchmarks.alone import live
from benchmarks.figures import Figure, Target, not_measured, ratio
from benchmarks.options import Options
from elastic.core.data.step_plan import StepPlan
from elastic.training.data.stream.loading import StreamReader, stream_reader
from elastic.training.data.stream.reader import Reader
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
    return [alone, peer, over, *_training(folder, options), *_peer_training(folder, options), *_states(corpus)]


def _write(folder: Path, documents: int) -> None:
    draw = random.Random(3)
    for number in range(READERS):
        lines = (
            [draw.randrange(VOCABULARY) for _ in range(draw.randrange(50, 800))] for _ in range(documents // READERS)
        )
        (folder / f"part-{number}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def _corpus(folder: Path, repeat: bool = True) -> Stream:
    pack = elastic.data.Pack(TOKENS, eos=0)
    return elastic.data.stream(elastic.data.jsonl(str(folder)), shuffle_window=WINDOW, pack=pack, repeat=repeat)


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


def _peer_batches(folder: Path) -> Iterator[torch.Tensor]:
    kind: Any = import_module("torchdata.stateful_dataloader").StatefulDataLoader
    loader = kind(_Packed(str(folder)), batch_size=MICRO_BATCH, num_workers=PROCESSES, prefetch_factor=4)
    batches: Iterator[torch.Tensor] = iter(loader)
    return batches


def _peer(folder: Path, steps: int, repetitions: int) -> tuple[float, ...]:
    """Raises ImportError where torchdata is not installed."""
    found = []
    for _ in range(repetitions):
        batches = _peer_batches(folder)
        for _ in range(READERS):
            next(batches)
        began = time.perf_counter()
        for _ in range(steps * READERS):
            next(batches)
        found.append(steps * GLOBAL_BATCH * TOKENS / (time.perf_counter() - began))
        del batches
    return tuple(found)


def _model(width: int = 64) -> nn.Module:
    """Steps of 45 ms on two cores; of a second with a width of 1024."""
    inner = nn.Sequential(nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, 16)) if width > 64 else nn.Linear(width, 16)
    return nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, width), nn.ReLU(), inner)


def _train(config: dict[str, Any]) -> None:
    model = _model(config["width"])
    engine, _, loader, _ = elastic.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        training_data=_corpus(Path(config["corpus"]), config["repeat"]),
        num_workers=PROCESSES,
        prefetch_factor=4,
        config={
            "train_batch_size": GLOBAL_BATCH,
            "train_micro_batch_size_per_gpu": MICRO_BATCH,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
        },
    )
    for _ in elastic.epochs():
        for batch in loader:
            engine.backward(engine(batch).square().mean())
            engine.step()


def _training(folder: Path, options: Options) -> list[Figure]:
    figures: list[Figure] = []
    for width, steps, about in ((64, 40, ""), (1024, 20, ", steps of a second")):
        for repeat, what in ((True, about), (False, f", with epochs{about}")):
            config = {"corpus": str(folder), "repeat": repeat, "width": width}
            folder_of_run = options.make_folder(f"run-{width}-{repeat}")
            lived = live(1, _train, config, folder_of_run, end_at=options.pick(steps, 5))
            # The first steps also wait for the processes to start.
            later = lived.steps[3:]
            rates = tuple(step.tokens / step.duration_s for step in later)
            waits = tuple(step.data_wait_s / step.duration_s for step in later)
            figures += _beside(what, rates, waits, "one rank, DeepSpeed ZeRO-1", targets=(Target("median", 0.02),))
    return figures


def _beside(
    what: str,
    rates: tuple[float, ...],
    waits: tuple[float, ...],
    note: str,
    targets: tuple[Target, ...] = (),
    **more: Any,
) -> list[Figure]:
    return [
        Figure(CASE, f"tokens trained on, next to loading{what}", "tokens/s", rates, notes=(note,), **more),
        Figure(CASE, f"share of a step spent waiting for data{what}", "", waits, targets=targets, **more),
    ]


def _peer_training(folder: Path, options: Options) -> list[Figure]:
    """The same model, micro-batches and optimizer over the peer's loader."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    rates, waits = [], []
    try:
        batches = _peer_batches(folder)
    except ImportError as error:
        names = ("tokens trained on, next to loading", "share of a step spent waiting for data")
        return [not_measured(CASE, name, "", str(error), subject=PEER) for name in names]
    for _ in range(options.pick(40, 5)):
        began, waited_s = time.perf_counter(), 0.0
        for _ in range(READERS):
            asked = time.perf_counter()
            batch = next(batches)
            waited_s += time.perf_counter() - asked
            (model(batch).square().mean() / READERS).backward()
        optimizer.step()
        optimizer.zero_grad()
        step_s = time.perf_counter() - began
        rates.append(GLOBAL_BATCH * TOKENS / step_s)
        waits.append(waited_s / step_s)
    return _beside("", tuple(rates[3:]), tuple(waits[3:]), "the same model, without an engine", subject=PEER)


class _Counting:
    """A corpus that counts the documents that it gives."""

    def __init__(self, corpus: Stream) -> None:
        (stages,) = corpus.parts.stages
        self.documents, self._open = 0, stages.open
        self.parts = replace(corpus.parts, stages=(replace(stages, open=self._opened),))

    def _opened(self, reader: int, readers: int) -> Any:
        source: Any = self._open(reader, readers)
        counting = self

        class Source:
            state_dict, load_state_dict = source.state_dict, source.load_state_dict

            def __iter__(self) -> Iterator[Any]:
                for document in source:
                    counting.documents += 1
                    yield document

        return Source()


def _states(corpus: Stream) -> list[Figure]:
    """Of all readers of a step, after each of its samples: what a loading process adds to every micro-batch."""
    counting = _Counting(corpus)
    readers = [Reader(counting.parts, 0, number, READERS) for number in range(READERS)]
    seconds, sizes, resumes, again = [], [], [], []
    for turn in range(200):
        for reader in readers:
            reader.read(reader.count, 1)
        began = time.perf_counter()
        states = [reader.state() for reader in readers]
        seconds.append(1e3 * (time.perf_counter() - began))
        sizes.append(max(float(len(json.dumps(state))) for state in states))
        if turn % 10 == 0:
            given, began = counting.documents, time.perf_counter()
            for number, state in enumerate(states):
                Reader(counting.parts, 0, number, READERS, state)
            resumes.append(time.perf_counter() - began)
            again.append((counting.documents - given) / READERS)
    return [
        Figure(CASE, f"state of {READERS} readers", "ms", tuple(seconds), targets=(Target("median", 0.1),)),
        Figure(CASE, "largest state of a reader", "bytes", tuple(sizes), targets=(Target("max", 1024.0),)),
        Figure(CASE, f"resume of {READERS} readers", "s", tuple(resumes)),
        # One document is read ahead, to see where an epoch ends.
        Figure(CASE, "documents that a reader reads again on resume", "", tuple(again),
               targets=(Target("max", WINDOW + 1),), notes=(f"windows of {WINDOW}",)),
    ]  # fmt: skip
