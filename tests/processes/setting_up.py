"""Training functions whose set-up asks, waits or fails."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import crew
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from trainings import Numbers, Small, build, deepspeed_config, one_pass

import elastic
from elastic.training.in_loop import ahead


def asks_nothing() -> Any:
    return None


def asks_in_a_thread() -> Any:
    """The answer comes when the training thread has its generation."""
    answers: list[int] = []
    threads.append(threading.Thread(target=lambda: answers.append(elastic.get_context().rank)))
    threads[-1].start()
    return answers


def copies_in_a_thread() -> None:
    """As botocore does for a credential; seen: the training thread waited for it, and it for the training thread."""
    thread = threading.Thread(target=os.environ.copy, daemon=True)
    thread.start()
    thread.join()


def asks_in_a_thread_that_is_waited_for() -> Any:
    ahead._STUCK_S = 1.0
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: elastic.get_context().rank).result()


def asks_deepspeed() -> int:
    import deepspeed

    return deepspeed.comm.get_rank() if deepspeed.comm.is_initialized() else 0


def asks_deepspeed_to_begin() -> int:
    import deepspeed

    deepspeed.init_distributed()
    return deepspeed.comm.get_rank()


threads: list[threading.Thread] = []


# What a script's set-up may ask for its rank.
ASKS: dict[str, Callable[[], Any]] = {
    "nothing": asks_nothing,
    "variable": lambda: int(os.environ["RANK"]),
    "world size": lambda: (int(os.environ["WORLD_SIZE"]), dist.get_world_size())[1],
    "variable, with a default": lambda: int(os.environ.get("RANK", 0)),
    "whether there is a variable": lambda: int(os.environ["RANK"]) if "RANK" in os.environ else 0,
    "torch": lambda: dist.get_rank() if dist.is_initialized() else 0,
    "deepspeed.comm": asks_deepspeed,
    "deepspeed.init_distributed": asks_deepspeed_to_begin,
    "elastic": lambda: elastic.get_context().rank,
    "elastic, for its step": lambda: elastic.get_context().step,
    "a thread": asks_in_a_thread,
    "not, and copies all variables": copies_in_a_thread,
    "a thread that is waited for": asks_in_a_thread_that_is_waited_for,
}


def sets_up_ahead(config: dict[str, Any]) -> None:
    """As `train`, with what set-up asks."""
    import deepspeed

    crew.told["calls"] = crew.told.get("calls", 0) + 1
    model = Small(0.1)
    crew.point("set up")
    if config.get("raises", 0) >= crew.told["calls"]:
        raise ValueError("the set-up has failed")
    crew.told["rank"] = ASKS[config.get("asks", "nothing")]()
    crew.point("asked")
    made = deepspeed.initialize if config.get("native") else elastic.initialize
    data: Any = Numbers(37, torch.float32)
    if config.get("prepares"):
        data = elastic.prepare_data_loader(DataLoader(data, batch_size=2, shuffle=True))
        crew.point("prepared")
    engine, _, loader, _ = made(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.02),
        training_data=data,
        config=deepspeed_config(config),
    )
    assert not config.get("prepares") or data.loader is loader
    elastic.state["starts"] = crew.told["starts"] = 1
    for _ in elastic.epochs():
        for batch in loader:
            one_pass(engine, batch)
    while threads:
        threads.pop().join()


def needs_nothing(config: dict[str, Any]) -> None:
    crew.told["calls"] = crew.told.get("calls", 0) + 1


def joins_in(config: dict[str, Any]) -> None:
    """Has a collective of its own at `config["place"]`; `config["by"]` says how it comes by its epochs."""
    places: dict[str, Callable[[], Any]] = {config["place"]: lambda: dist.all_reduce(torch.ones(1))}
    nothing = str
    places.get("set-up", nothing)()
    engine, loader = build(config)
    if config["place"] == "save":
        places["after"] = lambda: engine.save_checkpoint("a folder")
    for _ in elastic.epochs() if config["by"] == "elastic.epochs" else range(2):
        places.get("before", nothing)()
        batches = iter(loader)
        for batch in batches:
            one_pass(engine, batch)
            places.get("within", nothing)()
        del batches
        places.get("after", nothing)()


def stays_before_it_initializes(config: dict[str, Any]) -> None:
    crew.point("there")
    crew.stay()
