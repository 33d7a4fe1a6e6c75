"""One rank of this project without Ray: its generations one after the other, its snapshots in a process next to it."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.children import ROOT
from elastic.checkpoint.memory.snapshot_client import SnapshotClient
from elastic.checkpoint.memory.source import Holder, MemorySource
from elastic.checkpoint.snapshot import ShardSnapshot
from elastic.checkpoint.source import CheckpointSource
from elastic.comm.rendezvous import host_store
from elastic.core.checkpoint import manifest_json
from elastic.core.checkpoint.manifest import Manifest
from elastic.core.generation_spec import BatchSettings, GenerationSpec, MemoryPlan, Rendezvous
from elastic.training.local import LocalCoordinator
from elastic.training.loop import GenerationRunner
from elastic.training.session import Stop
from elastic.training.state.pins import pinning
from elastic.transport.handshake import TOKEN_BYTES

RUN_ID = "alone"
_READ_LIMIT_S = 120.0
_END_LIMIT_S = 20.0


class MemoryNode:
    """The process that holds the snapshots, and this process's hand in it. `with` ends it."""

    def __init__(self) -> None:
        self._token = secrets.token_bytes(TOKEN_BYTES)
        command = [sys.executable, "-m", "benchmarks.bodies.memory_node", self._token.hex(), RUN_ID]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
        )
        place = self._hear()
        self._holder = Holder((place["address"][0], place["address"][1]), place["local_name"])
        self.memory = SnapshotClient(place["local_name"], self._token, pinning("deepspeed"))

    def newest(self) -> tuple[str, Manifest]:
        """The id of the newest snapshot and its manifest. RuntimeError where there is none."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        answer = self._hear()
        if answer is None:
            raise RuntimeError("the node holds no snapshot")
        return answer["id"], manifest_json.from_json(answer["manifest"])

    def source(self, manifest: Manifest) -> MemorySource:
        return MemorySource(lambda _: manifest, {0: self._holder}, self._token, timeout_s=_READ_LIMIT_S)

    def _hear(self) -> Any:
        assert self._process.stdout is not None
        key = self._process.stdout.readline()
        if not key:
            raise RuntimeError(f"the process of the node's memory ended with {self._process.wait(_END_LIMIT_S)}")
        return json.loads(key)

    def __enter__(self) -> MemoryNode:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.memory.close()
        try:
            # Its input ends, and so does it.
            self._process.communicate(timeout=_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_END_LIMIT_S)


class AloneCoordinator(LocalCoordinator):
    """Snapshots go to `node` and come from it; nothing is written to storage."""

    def __init__(
        self, spec: GenerationSpec, rendezvous: Rendezvous, url: str, end_at: int, node: MemoryNode | None,
        manifest: Manifest | None,
    ) -> None:  # fmt: skip
        super().__init__(spec, rendezvous, url, end_at)
        self._last, self._node, self._manifest = end_at, node, manifest

    def source(self) -> CheckpointSource:
        assert self._node is not None
        assert self._manifest is not None
        return self._node.source(self._manifest)

    def memory(self) -> SnapshotClient | None:
        return None if self._node is None else self._node.memory

    def boundary(self, step: int) -> Stop | None:
        return Stop.MEMORY if step == self._last else None

    def save(self, snapshot: ShardSnapshot) -> None:
        """What is measured is the memory."""


@dataclass(frozen=True)
class Lived:
    """One generation that came to its planned end: its steps' and its restore's reports."""

    steps: list[Any]
    restores: list[Any]


def live(
    number: int,
    train: Callable[[dict[str, Any]], None],
    config: Mapping[str, Any],
    folder: Path,
    *,
    end_at: int,
    node: MemoryNode | None = None,
    restore: bool = False,
    aborted: Callable[[GenerationRunner], None] | None = None,
) -> Lived:
    """Generation `number` up to step `end_at`; with `node` a snapshot at every step, with `restore` from its newest.
    `aborted` gets the runner, and has it aborted after that step: it does not end there by itself then.

    Raises RuntimeError with the generation's own words where it ends otherwise.
    """
    checkpoint, manifest = node.newest() if restore and node is not None else (None, None)
    spec = GenerationSpec(
        RUN_ID, number, 0, 1, batch=BatchSettings(max_steps=1_000_000), checkpoint=checkpoint,
        memory=None if node is None else MemoryPlan(every_steps=1),
    )  # fmt: skip
    rendezvous = host_store("127.0.0.1")
    last = end_at if aborted is None else -1
    coordinator = AloneCoordinator(spec, rendezvous, str(folder), last, node, manifest)
    runner = GenerationRunner(spec, coordinator, rendezvous, on_result=lambda _: coordinator.close(wait=False))
    if aborted is not None:
        aborted(runner)
    result = runner.run(train, dict(config))
    if result.kind != "ended" or result.step != end_at:
        raise RuntimeError(f"generation {number} came to {result.kind} at step {result.step}: {result.traceback}")
    return Lived(coordinator.reports, coordinator.restores)
