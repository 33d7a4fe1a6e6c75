"""Several ranks that do one job of `benchmarks.bodies.state_worker` together, and what each of them tells."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.children import Children, NotMeasured, free_port

_LIMIT_S = 240.0


def do(children: Children, what: str, world_size: int, repetitions: int = 1, **job: Any) -> list[dict[str, Any]]:
    """The answers by rank. Raises NotMeasured where a rank fails or none comes in time."""
    name = f"{what}-{world_size}{'-universal' if job.get('universal') else ''}"
    ports, port = [free_port() for _ in range(repetitions)], str(free_port())
    told = [children.folder / f"{name}-{rank}.json" for rank in range(world_size)]
    for rank, file in enumerate(told):
        text = json.dumps({"do": what, "ports": ports, "told": str(file), **job})
        children.start_python(
            f"{name}-{rank}", "benchmarks.bodies.state_worker", text, RANK=str(rank), WORLD_SIZE=str(world_size),
            LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
        )  # fmt: skip
    for rank in range(world_size):
        status = children.wait(f"{name}-{rank}", _LIMIT_S)
        if status != 0:
            raise NotMeasured(f"{name}-{rank} ended with {status}: {children.tail(f'{name}-{rank}')}")
    return [json.loads(file.read_text(encoding="utf-8")) for file in told]
