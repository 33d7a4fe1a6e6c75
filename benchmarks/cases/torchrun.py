"""torchrun elastic with DeepSpeed and universal checkpoints; one of four agents is killed with its worker."""

from __future__ import annotations

import time

from benchmarks.children import Children, NotMeasured, free_port
from benchmarks.figures import Figure, not_measured
from benchmarks.marks import Change, completed, read_marks, recovered
from benchmarks.options import Options
from benchmarks.workload import SMALL

CASE, SUBJECT, NAME = "torchrun", "torchrun + DeepSpeed", "node SIGKILL -> next step, 4 -> 3, ZeRO-1"
AGENTS = 4
SAVE_EVERY = 10
NOTES = (
    "--nnodes 2:4 --max-restarts 3, c10d rendezvous, every timeout at its default (last call: 30 s)",
    f"a checkpoint every {SAVE_EVERY} steps, ds_to_universal and load_universal on restart",
    "a fresh store per rendezvous (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1): with the shared one, the default, no restart "
    "succeeded here, since agents that restart for different reasons count differently and their workers never meet",
    "sample position and learning rate are left to the user, and not restored here",
)
_FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
_START_LIMIT_S, _RECOVER_LIMIT_S = 150.0, 240.0


def measure(options: Options) -> list[Figure]:
    folder = options.make_folder("torchrun")
    (folder / "checkpoints").mkdir()
    with Children(folder) as children:
        try:
            _start(children)
            found = _kill_one(children)
        except NotMeasured as error:
            return [not_measured(CASE, NAME, "s", str(error), subject=SUBJECT, notes=NOTES)]
    return [
        Figure(CASE, NAME, "s", (found.seconds,), SUBJECT, notes=NOTES),
        Figure(CASE, f"{NAME}: steps repeated", "steps", (float(found.steps_repeated),), SUBJECT),
    ]


def _start(children: Children) -> None:
    port, folder = free_port(), str(children.folder)
    for agent in range(AGENTS):
        children.start_python(
            f"agent-{agent}", "torch.distributed.run", f"--nnodes=2:{AGENTS}", "--nproc_per_node=1", "--max_restarts=3",
            "--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_id=benchmark",
            f"--rdzv_conf=is_host={int(agent == 0)}", "--local_addr=127.0.0.1", "-m",
            "benchmarks.bodies.torchrun_worker", SMALL.name, "1", folder, f"{folder}/checkpoints", str(SAVE_EVERY),
            **_FRESH_STORE,
        )  # fmt: skip


def _kill_one(children: Children) -> Change:
    def enough() -> bool:
        done = completed(read_marks(children.folder))
        return bool(done) and done[-1].world_size == AGENTS and done[-1].step >= 2 * SAVE_EVERY + SAVE_EVERY // 2

    children.until(enough, f"{SAVE_EVERY} steps of {AGENTS} workers", _START_LIMIT_S)
    # The agent that serves the rendezvous is the first; without it torchrun cannot continue at all.
    at = children.kill(f"agent-{AGENTS - 1}")

    def back() -> Change | None:
        return recovered(read_marks(children.folder), at)

    return children.until(back, f"a step after the loss of an agent at {time.ctime(at)}", _RECOVER_LIMIT_S)
