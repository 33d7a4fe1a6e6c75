"""What a run is measured against: the same training in four plain processes that nothing happens to."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import forks
import torch

from elastic.checkpoint.source import ReadRange
from elastic.checkpoint.storage import CheckpointStore
from elastic.core.data.steps import Range

_LIMIT_S = 120.0
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64}


@dataclass(frozen=True)
class Outcome:
    """`state` is every "<kind>/<name>" of the final checkpoint as one flat tensor; `losses` are those of every step."""

    state: Mapping[str, torch.Tensor]
    losses: Mapping[int, float]

    def distance(self, other: Outcome) -> float:
        """The largest difference of any tensor or loss, relative to its largest element, or absolute below one."""
        mine, others = self._all(), other._all()
        assert mine.keys() == others.keys()
        return max(float((mine[k] - others[k]).abs().max() / mine[k].abs().max().clamp(min=1.0)) for k in mine)

    def _all(self) -> dict[str, torch.Tensor]:
        losses = {f"loss of step {step}": torch.tensor(loss) for step, loss in self.losses.items()}
        return {**self.state, **losses}


class Undisturbed:
    """Processes, started once; each trains as any rank of one generation after another."""

    def __init__(self, size: int = 4) -> None:
        self._runs = 0
        self._members = [_member() for _ in range(size)]

    def train(
        self,
        config: Mapping[str, Any],
        epochs: int,
        folder: Path,
        world_size: int,
        skips: tuple[Range, ...] = (),
        **more: Any,
    ) -> Outcome:
        """`loops.train` from the first step to the last at one world size, without the positions that are skipped.
        Files go below `folder`. `more` are fields of GenerationSpec."""
        folder.mkdir()
        self._runs += 1
        pipes = [pipe for _, pipe in self._members[:world_size]]
        pipes[0].send(None)
        rendezvous = _receive(pipes[0])
        fields = {
            "run_id": "still",
            "generation": self._runs,
            "world_size": world_size,
            "max_world_size": 4,
            "skips": skips,
            **more,
        }
        for rank, pipe in enumerate(pipes):
            pipe.send(({**config, "folder": str(folder)}, epochs, {**fields, "rank": rank}, rendezvous))
        losses: Counter[int] = Counter()
        for told in [_receive(pipe) for pipe in pipes]:
            losses.update(told)
        return Outcome(whole_state(CheckpointStore(str(folder), "still")), dict(losses))

    def close(self) -> None:
        for process, pipe in self._members:
            process.kill()
            process.join()
            pipe.close()


def _member() -> tuple[Any, Connection]:
    made = forks.context()
    ours, theirs = made.Pipe()
    process = made.Process(target=_live, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def whole_state(store: CheckpointStore) -> dict[str, torch.Tensor]:
    """Every "<kind>/<name>" of the newest checkpoint, put together from its shards."""
    manifest = store.manifest(store.list()[0].id)
    whole: dict[str, torch.Tensor] = {}
    for shard in manifest.shards:
        for stored in shard.tensors:
            kind, buffer = stored.key.split("/", 1)
            flat = torch.empty(stored.numel, dtype=_DTYPES[stored.dtype])
            store.read(manifest, [ReadRange(shard.rank, stored.key, 0, stored.numel, flat)])
            for chunk in (chunk for chunk in shard.chunks if chunk.buffer == buffer):
                numel = math.prod(manifest.parameters[chunk.name])
                target = whole.setdefault(f"{kind}/{chunk.name}", torch.full((numel,), math.nan, dtype=torch.float64))
                target[chunk.start : chunk.stop] = flat[chunk.offset : chunk.offset + chunk.numel].double()
    return whole


def _receive(pipe: Connection) -> Any:
    if not pipe.poll(_LIMIT_S):
        raise TimeoutError(f"a process has told nothing for {_LIMIT_S:g} s")
    told = pipe.recv()
    if isinstance(told, str):
        raise RuntimeError(told)
    return told


def _live(pipe: Connection) -> None:
    """In the process: None asks for a rendezvous, anything else is a generation to train."""
    torch.set_num_threads(1)
    import loops

    from elastic.comm.rendezvous import host_store
    from elastic.core.generation_spec import BatchSettings, GenerationSpec
    from elastic.engines.deepspeed.kind import KIND
    from elastic.training.cleanup import warm_up
    from elastic.training.local import run_local

    warm_up(KIND)
    while True:
        try:
            order = pipe.recv()
        except EOFError:
            return
        if order is None:
            pipe.send(host_store("127.0.0.1"))
            continue
        config, epochs, fields, rendezvous = order
        spec = GenerationSpec(**fields, batch=BatchSettings(epochs=epochs), engine=config.get("engine", "deepspeed"))
        result, coordinator = run_local(loops.train, config, spec, rendezvous, config["folder"])
        if result.kind != "finished":
            pipe.send(f"rank {spec.rank} ended by {result.kind}: {result.message}\n{result.traceback}")
        else:
            pipe.send({report.step: report.loss for report in coordinator.reports})
