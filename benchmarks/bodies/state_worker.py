"""One rank that saves or loads, without Ray, and writes down how long it took. `argv`: a JSON object.

`do` is one of the functions below; `size`, `stage`, `folder` (of the checkpoints), `ports` (one per repetition, for
this project's generations), `told` (the file for the answer). With `tp` the state is sharded by FSDP2 in place of ZeRO,
over ranks of which so many share each MLP. RANK, WORLD_SIZE and the master's address are set.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import workload
from benchmarks.bodies import deepspeed_alone, fsdp2_alone

Job = dict[str, Any]
Told = dict[str, Any]
_STEPS = 2


def own_save(job: Job) -> Told:
    """Two steps and a checkpoint."""
    result, _ = _generation(job, job["ports"][0], 1, None, end_at=_STEPS)
    return {"result": str(result.kind)}


def own_load(job: Job) -> Told:
    """The newest checkpoint into a new engine, once per port."""
    from elastic.checkpoint.storage import CheckpointStore

    found = []
    newest = CheckpointStore(job["folder"], "run").list()[0]
    for number, port in enumerate(job["ports"], 2):
        _, coordinator = _generation(job, port, number, newest.id, end_at=None)
        report = coordinator.restores[0]
        found.append({name: getattr(report, name) for name in
                      ("bytes_read", "bytes_needed", "read_s", "install_s", "verify_s")})  # fmt: skip
    return {"loads": found}


def own_steps(job: Job) -> Told:
    """So many steps; of each its seconds, and on rank 0 how many collectives the ledger has of it."""
    _, coordinator = _generation(job, job["ports"][0], 1, None, end_at=job["steps"])
    steps = [
        {"seconds": report.duration_s, "calls": sum(use.calls for use in report.collectives)}
        for report in coordinator.reports
    ]
    return {"steps": steps}


def native_save(job: Job) -> Told:
    engine, batches = deepspeed_alone.make_engine(workload.SIZES[job["size"]], job["stage"])
    _train(engine, batches, _STEPS)
    deepspeed_alone.save(engine, Path(job["folder"]))
    return {}


def native_load(job: Job) -> Told:
    """What DeepSpeed can load at the world size at which it was saved; or, with `universal`, what was converted."""
    import torch

    folder = Path(job["folder"])
    tag = deepspeed_alone.newest(folder)
    assert tag is not None
    converted = 0.0
    if job.get("universal"):
        # Nothing is trained here, and the run's batch need not divide by this world size.
        size = workload.SIZES[job["size"]]
        dealt = replace(size, batch=size.micro * int(os.environ["WORLD_SIZE"]))
        engine, _ = deepspeed_alone.make_engine(dealt, job["stage"], universal=True)
        if torch.distributed.get_rank() == 0:
            converted = deepspeed_alone.convert(folder / tag, folder / f"{tag}_universal")
        torch.distributed.barrier()
        tag = f"{tag}_universal"
    else:
        engine, _ = deepspeed_alone.make_engine(workload.SIZES[job["size"]], job["stage"])
    seconds = []
    for _ in job["ports"]:
        torch.distributed.barrier()
        begun = time.perf_counter()
        engine.load_checkpoint(str(folder), tag=tag)
        seconds.append(time.perf_counter() - begun)
    return {"seconds": seconds, "converted_s": converted}


def dcp_save(job: Job) -> Told:
    """The state of this rank with `torch.distributed.checkpoint.async_save`: how long the call keeps the training."""
    import torch
    from torch.distributed.checkpoint.state_dict_saver import async_save

    engine, batches = deepspeed_alone.make_engine(workload.SIZES[job["size"]], job["stage"])
    _train(engine, batches, _STEPS)
    rank, seconds = torch.distributed.get_rank(), []
    group = torch.distributed.new_group(backend="gloo")
    for number in range(job["saves"]):
        target = Path(job["folder"]) / f"dcp-{number}"
        torch.distributed.barrier()
        begun = time.perf_counter()
        written: Any = async_save({f"rank{rank}": own_state(engine)}, checkpoint_id=str(target), process_group=group)
        seconds.append(time.perf_counter() - begun)
        _train(engine, batches, _STEPS)
        written.result()
    size = sum(tensor.numel() * tensor.element_size() for tensor in own_state(engine).values())
    return {"seconds": seconds, "bytes": size}


def sharded_save(job: Job) -> Told:
    """FSDP2 without this project, and `torch.distributed.checkpoint.save`."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save

    model, optimizer, data = fsdp2_alone.build(workload.SIZES[job["size"]], job["tp"])
    fsdp2_alone.train(model, optimizer, data, _STEPS)
    weights, moments = get_state_dict(model, optimizer)
    save({"model": weights, "optimizer": moments}, checkpoint_id=job["folder"])
    return {}


def sharded_load(job: Job) -> Told:
    """What was saved on another mesh, into this one."""
    import torch
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    model, optimizer, _ = fsdp2_alone.build(workload.SIZES[job["size"]], job["tp"])
    seconds = []
    for _ in job["ports"]:
        weights, moments = get_state_dict(model, optimizer)
        torch.distributed.barrier()
        begun = time.perf_counter()
        load({"model": weights, "optimizer": moments}, checkpoint_id=job["folder"])
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        seconds.append(time.perf_counter() - begun)
    return {"seconds": seconds}


def own_state(engine: Any) -> dict[str, Any]:
    """What ZeRO-1 and 2 keep of the state on this rank: masters and both moments."""
    zero, found = engine.optimizer, {}
    for group, master in enumerate(zero.single_partition_of_fp32_groups):
        found[f"{group}.master"] = master.data
        for name in ("exp_avg", "exp_avg_sq"):
            found[f"{group}.{name}"] = zero.optimizer.state[master][name]
    return found


def _train(engine: Any, batches: Any, steps: int) -> None:
    for _, _step in zip(range(steps), deepspeed_alone.steps(engine, batches), strict=False):
        pass


def _generation(job: Job, port: int, number: int, checkpoint: str | None, end_at: int | None) -> tuple[Any, Any]:
    from elastic.comm.rendezvous import host_store
    from elastic.core.generation_spec import BatchSettings, GenerationSpec, Rendezvous
    from elastic.training.local import run_local

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rendezvous = host_store("127.0.0.1", port) if rank == 0 else Rendezvous("127.0.0.1", port)
    tp = job.get("tp")
    mesh: dict[str, Any] = {} if tp is None else {"engine": "fsdp2", "tp": tp}
    spec = GenerationSpec(
        run_id="run", generation=number, rank=rank, world_size=world_size, max_world_size=world_size,
        batch=BatchSettings(max_steps=_STEPS if end_at is None else None), checkpoint=checkpoint, **mesh,
    )  # fmt: skip
    config = {"size": job["size"], "stage": job["stage"], "marks": job["folder"]}
    train = workload.train if tp is None else fsdp2_alone.train_elastic
    result, coordinator = run_local(train, config, spec, rendezvous, job["folder"], end_at)
    if result.kind not in ("finished", "ended"):
        raise RuntimeError(f"generation {number} came to {result}")
    return result, coordinator


JOBS: dict[str, Callable[[Job], Told]] = {
    job.__name__: job
    for job in (own_save, own_load, own_steps, native_save, native_load, dcp_save, sharded_save, sharded_load)
}


def main(text: str) -> None:
    job = json.loads(text)
    told = JOBS[job["do"]](job)
    Path(job["told"]).write_text(json.dumps(told), encoding="utf-8")
    # At once: threads that torch does not join may abort a process that ends by itself (seen with DeepSpeed alone).
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
