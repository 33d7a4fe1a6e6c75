"""Training functions of the Ray tests, written as a user would write them, except that the test says how far they go.

`config["folder"]` is shared between the test and the workers: `allowed` in it holds the last step that may be passed,
and each rank leaves there which samples its dataset gave it, file by file, for the test to count by itself.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

import elastic
from elastic.checkpoint.storage import CheckpointStore
from elastic.core import events as ev
from elastic.core.data.steps import StepReport
from elastic.runtime import storage_retry
from elastic.training import context

_POLL_S = 0.005
_PATIENCE_S = 240.0


class Small(nn.Module):
    """Two layers of 16 with dropout between them, and a parameter of three elements."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.dropout = nn.Dropout(dropout)
        self.second = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.second(self.dropout(torch.tanh(self.first(x))))
        return answer


class Numbers(torch.utils.data.Dataset[Any]):
    """`given` are the indices that it was asked for since the last step ended."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.size, self.dtype = size, dtype
        self.given: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.given.append(index)
        x = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return x.to(self.dtype), torch.stack([x.sum(), x[0] * x[1], x.abs().max()]).to(self.dtype)


def deepspeed_config(config: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {
        "train_batch_size": config.get("batch", 10),
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": config.get("gradient_clipping", 0.5),
        "zero_optimization": {"stage": config.get("stage", 2), "stage3_param_persistence_threshold": 20},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 0.02}},
    }
    if config.get("dtype") == "bf16":
        made["bf16"] = {"enabled": True}
    return made


def of_engine(config: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What `elastic.initialize` is given besides, for the engine that `config` names."""
    if config.get("engine") != "fsdp2":
        return {"config": deepspeed_config(config)}
    options = {"global_batch": config.get("batch", 10), "micro_batch": 2, "gradient_clipping": 0.5}
    return {
        "config": {**options, "shard_workers": config.get("shard_workers")},
        "lr_scheduler": torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5),
    }


def slow_stages(config: dict[str, Any]) -> None:
    """Slower links between as many stages as the test says, by which a step takes so much longer."""
    time.sleep(config.get("slower_with_pp", {}).get(str(elastic.get_context().mesh["pp"]), 0.0))


# The engines that this process has built, the newest last; not kept alive from here.
_ENGINES: list[Callable[[], Any]] = []


def build(config: dict[str, Any]) -> tuple[Any, Any, Numbers]:
    dtype = torch.bfloat16 if config.get("dtype") == "bf16" else torch.float32
    data = Numbers(config["size"], dtype)
    model = Small(config.get("dropout", 0.1))
    if config.get("compiled"):
        model.compile(backend="aot_eager")
    optimizer: torch.optim.Optimizer
    if config.get("optimizer") == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    engine, _, loader, _ = elastic.initialize(
        model=model, training_data=data, optimizer=optimizer, **of_engine(config, optimizer)
    )
    _ENGINES.append(weakref.ref(engine))
    between_steps(config, data)
    return engine, loader, data


# The coordinator's own, and what `between_steps` was last given.
_ASK: list[Callable[[Any, int], Any]] = []
_LOOP: list[tuple[dict[str, Any], Numbers]] = []
_calls = 0


def between_steps(config: dict[str, Any], data: Numbers) -> None:
    """Have `_closed_step` called after every step of this process: it is closed then, and the next has not begun.

    The user's code does not run at that moment: what it does after engine.step() belongs to the step. For the class,
    since the training function stays in its loop while coordinators change.
    """
    generation = context.current()
    assert generation is not None
    kind: Any = type(generation.scope.coordinator)
    _LOOP[:] = [(config, data)]
    global _calls
    _calls += 1
    _put(Path(config["folder"]) / f"called-{os.getpid()}", str(_calls))
    if not _ASK:
        _ASK.append(kind.boundary)
        kind.boundary = _boundary
        restored = kind.restored

        step_done = kind.step_done

        def note(coordinator: Any, report: Any) -> None:
            coordinator.kept = report.kept
            restored(coordinator, report)

        def count(coordinator: Any, report: Any) -> None:
            # A rank without a micro-batch of its own has read one for its padding pass; audits come last.
            if vars(coordinator).pop("kept", 0) or report.audit or _begins(coordinator, report.step):
                del _LOOP[0][1].given[report.samples :]
            step_done(coordinator, report)

        kind.restored, kind.step_done = note, count


def _begins(coordinator: Any, step: int) -> bool:
    """The generation with this step, in which a padding pass had nothing to copy; of a cell its first rank, which alone
    says how many samples were its own."""
    generation = context.current()
    assert generation is not None
    spec = generation.scope.spec
    return spec.rank == spec.mesh.cell(spec.rank).start and step == vars(coordinator).get("begun", -1) + 1


def _boundary(coordinator: Any, step: int) -> Any:
    config, data = _LOOP[0]
    if "begun" not in vars(coordinator):
        coordinator.begun = step
        # Of a step that was abandoned: what this rank keeps of it came first, two samples at a time.
        del data.given[2 * vars(coordinator).get("kept", 0) :]
    elif step > coordinator.begun:
        _closed_step(config, elastic.get_context(), data)
    return _ASK[0](coordinator, step)


def train(config: dict[str, Any]) -> None:
    """The whole run. `config["fault"]` = {"kind", "rank", "step"}: what that rank does after that step."""
    engine, loader, _ = build(config)
    for _ in elastic.epochs():
        for x, y in loader:
            loss = nn.functional.mse_loss(engine(x).float(), y.float())
            engine.backward(loss)
            if config.get("metrics"):
                elastic.report(rank=elastic.get_context().step % 2 + elastic.get_context().rank)
            engine.step()


def _closed_step(config: dict[str, Any], now: Any, data: Numbers) -> None:
    folder = Path(config["folder"])
    given, data.given = data.given, []
    if pace_s := config.get("pace_s"):
        # A run of hours: nobody counts its files.
        time.sleep(pace_s)
        return
    _put(folder / f"given-{now.generation}-{now.rank}-{now.step}.json", json.dumps(given))
    fault = config.get("fault")
    if fault is not None and (now.step, now.rank) == (fault["step"], fault["rank"]):
        _FAULTS[fault["kind"]](folder, now)
    gate(folder, now.step)


def gate(folder: Path, step: int) -> None:
    """Wait until the test lets training pass `step`, or until the generation ends."""
    generation, until = context.current(), time.monotonic() + _PATIENCE_S
    while step >= allowed(folder):
        assert generation is not None
        generation.scope.check()
        if time.monotonic() > until:
            raise TimeoutError(f"the test did not let training go past step {step}")
        time.sleep(_POLL_S)


def allowed(folder: Path) -> int:
    try:
        return int((folder / "allowed").read_text())
    except FileNotFoundError:
        return 1 << 30


def allow(folder: Path, step: int) -> None:
    """In the test's process: training may finish step `step`, and no more."""
    _put(folder / "allowed", str(step))


def _put(path: Path, text: str) -> None:
    """At once: a reader sees all of it, and a killed writer leaves no part of it."""
    made = path.with_name(f"{path.name}.{os.getpid()}")
    made.write_text(text)
    os.replace(made, path)


# -- faults of user code -----------------------------------------------------------------------------------------------


def _first_time(folder: Path, name: str) -> bool:
    """True once, over all processes of the run."""
    try:
        (folder / f"did-{name}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _raise(folder: Path, now: Any) -> None:
    raise ZeroDivisionError(f"the user's own mistake on rank {now.rank}")


def _raise_once(folder: Path, now: Any) -> None:
    if _first_time(folder, "raise"):
        _raise(folder, now)


def _hang_once(folder: Path, now: Any) -> None:
    """Alive, with a beating heart, and never coming back."""
    if _first_time(folder, "hang"):
        threading.Event().wait()


def _leave_a_zombie(folder: Path, now: Any) -> None:
    """A thread of this generation that outlives it, in a process that continues with the next one."""
    generation = context.current()
    if generation is not None and _first_time(folder, "zombie"):
        scope, saving = generation.scope, cast(Any, generation.steps)._snapshots
        snapshot = saving._state.snapshot(
            run_id=scope.spec.run_id, generation=scope.spec.generation, step=scope.step, caller=saving._run_state()
        )
        threading.Thread(target=_haunt, args=(folder, scope, _ENGINES[-1](), snapshot), daemon=True).start()


def _haunt(folder: Path, scope: Any, engine: Any, snapshot: Any) -> None:
    """When the test says so: everything that a rank of a generation that is over might still try."""
    while not (folder / "zombie-go").exists():
        time.sleep(_POLL_S)
    member, spec = scope.coordinator, scope.spec
    committed = dataclasses.replace(snapshot, step=5)
    ahead = StepReport(snapshot.step + 1, 1e9, ((0, 127),), 127, 0.1)
    last_words = [
        ev.CollectiveFailed(spec.generation, member._worker, ahead.step, "the zombie's own"),
        ev.UserCodeFailed(spec.generation, member._worker, ahead.step, "the zombie's own"),
        ev.RestoreFailed(spec.generation, member._worker, "step-00000005-g0001", "the zombie's own"),
        ev.WorkerCompleted(spec.generation, member._worker, 1000, True),
        ev.WorkerLeft(spec.generation, member._worker, 1000),
    ]
    tries = {
        "write into a complete checkpoint": lambda: member._source.write_shard(committed),
        "save a shard": lambda: member.save(snapshot),
        "report a step": lambda: member.step_done(ahead),
        "continue": lambda: _ASK[0](member, snapshot.step),
        "use the engine": lambda: engine(torch.zeros(2, 16)),
        "say last words": lambda: [member._post(event) for event in last_words],
    }
    outcomes = {name: _outcome(attempt) for name, attempt in tries.items()}
    member._outbox.drained(30.0)
    _put(folder / "zombie-done", json.dumps(outcomes))


def _outcome(attempt: Any) -> str | None:
    try:
        attempt()
    except BaseException as error:  # noqa: BLE001 - GenerationEnded is none of the others
        return type(error).__name__
    return None


def _abort_once(folder: Path, now: Any) -> None:
    """As native code ends a process."""
    if _first_time(folder, "abort"):
        os.abort()


_FAULTS = {
    "raise": _raise, "raise-once": _raise_once, "hang-once": _hang_once, "zombie": _leave_a_zombie,
    "abort-once": _abort_once,
}  # fmt: skip


def never_trains(config: dict[str, Any]) -> None:
    """It does not get further than that where the job's batch is another."""
    build(config)


def returns_early(config: dict[str, Any]) -> None:
    engine, loader, _ = build(config)
    for x, y in loader:
        engine.backward(nn.functional.mse_loss(engine(x), y))
        engine.step()
        if elastic.get_context().step == config["stop_after"]:
            return


def counts_by_itself(config: dict[str, Any]) -> None:
    """`stop_after` steps by a variable of this function, which begins with 0 on a worker that joins."""
    engine, loader, _ = build(config)
    counter, batches = 0, (batch for _ in elastic.epochs() for batch in loader)
    while counter < config["stop_after"]:
        x, y = next(batches)
        counter += engine.is_gradient_accumulation_boundary()
        engine.backward(nn.functional.mse_loss(engine(x), y))
        engine.step()


def saves_by_itself(config: dict[str, Any]) -> None:
    """At every fourth step by a variable of this function, which begins with 0 on a worker that joins."""
    engine, loader, _ = build(config)
    counter = 0
    for _ in elastic.epochs():
        for x, y in loader:
            last = engine.is_gradient_accumulation_boundary()
            engine.backward(nn.functional.mse_loss(engine(x), y))
            engine.step()
            counter += last
            if last and counter % 4 == 0:
                engine.save_checkpoint("of its own")


def restores_slowly(config: dict[str, Any]) -> None:
    """Storage is slow from the second generation on: `part_s` for every few bytes of a shard."""
    if elastic.get_context().generation > 1:
        storage_retry._FIRST_PART_BYTES = 64
        read_into = CheckpointStore.read

        def slow(store: CheckpointStore, manifest: Any, ranges: Any) -> int:
            time.sleep(config["part_s"])
            return read_into(store, manifest, ranges)

        CheckpointStore.read = slow  # type: ignore[assignment, method-assign]
        try:
            train(config)
        finally:
            CheckpointStore.read = read_into  # type: ignore[method-assign]
    else:
        train(config)


def evaluates_and_exports(config: dict[str, Any]) -> None:
    """After step 2 every rank evaluates for `slow_s`, after step 3 rank 0 alone does something else for as long, and
    after the last step it exports for as long. Its set-up computes for `set_up_s`, in the generation."""
    until = time.monotonic() + (config["set_up_s"] if elastic.get_context().world_size else 0)
    while time.monotonic() < until:
        torch.randn(100, 100) @ torch.randn(100, 100)
    engine, loader, _ = build(config)
    before = elastic.get_context().step
    for _ in elastic.epochs():
        for x, y in loader:
            engine.backward(nn.functional.mse_loss(engine(x), y))
            engine.step()
            now = elastic.get_context()
            if now.step == before:
                continue
            before = now.step
            until = time.monotonic() + config["slow_s"]
            if now.step == 2:
                engine.eval()
                while time.monotonic() < until:
                    with torch.no_grad():
                        engine(x)
                engine.train()
            elif now.step == 3 and now.rank == 0:
                with elastic.busy("talking to a tracker"):
                    time.sleep(config["slow_s"])
    if elastic.get_context().rank == 0:
        time.sleep(config["slow_s"])


def sets_up_while_held(config: dict[str, Any]) -> None:
    set_up_while_held(config)
    train(config)


def sets_up_busily(config: dict[str, Any]) -> None:
    """The set-up waits, and says that it is no hang."""
    with elastic.busy("reading"):
        set_up_while_held(config)
    train(config)


def set_up_while_held(config: dict[str, Any]) -> None:
    """Set-up lasts as long as the test wants: as long as `hold` is in the folder. Where the test wants it asks for its
    place before, comes to a barrier, and agrees on a name."""
    if config.get("asks"):
        told = f"{os.environ['RANK']} of {torch.distributed.get_world_size()}"
        _put(Path(config["folder"]) / f"told-{os.getpid()}", told)
        # After what one rank would do for all.
        torch.distributed.barrier()
        name = [f"of process {os.getpid()}"]
        torch.distributed.broadcast_object_list(name, src=0)
        _put(Path(config["folder"]) / f"name-{os.getpid()}", name[0])
    hold, until = Path(config["folder"]) / "hold", time.monotonic() + _PATIENCE_S
    while hold.exists() and time.monotonic() < until:
        (hold.parent / "sets up").touch()
        time.sleep(_POLL_S)


def sums_up(config: dict[str, Any]) -> None:
    """The set-up adds up what the ranks have: here how many they are."""
    found = torch.ones(1)
    torch.distributed.all_reduce(found)
    _put(Path(config["folder"]) / f"sum-{os.getpid()}", str(int(found)))
    train(config)
