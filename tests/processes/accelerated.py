"""A script of accelerate's, as a training function of the process tests: its Accelerator says who logs, gathers what an
evaluation has found, and ends the training; `prepare` of model, optimizer and data has become `elastic.initialize`."""

from __future__ import annotations

from typing import Any

import crew
import torch
from torch.utils.data import DataLoader

import elastic

EVALUATED = 10


class Stream(torch.utils.data.IterableDataset[Any]):
    """The same without a length."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __iter__(self) -> Any:
        return iter([self._rows[number] for number in range(len(self._rows))])


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, size: int, seed: int) -> None:
        made = torch.Generator().manual_seed(seed)
        self._rows = torch.randn(size, 6, generator=made)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self._rows[index], "label": (self._rows[index].sum() > 0).long()}


def _of_engine(stage: int | None) -> dict[str, Any]:
    """None: FSDP2, whose ranks may share each layer."""
    if stage is not None:
        config: dict[str, Any] = {"train_batch_size": 6, "zero_optimization": {"stage": stage}}
        if elastic.get_context().mesh["tp"] > 1:
            cut = {"column": [r"^0\.weight$"], "row": [r"^2\.weight$"]}
            specs = [{"patterns": patterns, "partition_type": kind} for kind, patterns in cut.items()]
            config["tensor_parallel"] = {"partition_config": {"use_default_specs": False, "layer_specs": specs}}
        return {"config": config}
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return {"config": {"global_batch": 6}, "tp_plan": {"0": ColwiseParallel(), "2": RowwiseParallel()}}


def classifies(config: dict[str, Any]) -> None:
    from accelerate import Accelerator

    crew.told["calls"] = crew.told.get("calls", 0) + 1
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    rows = Rows(EVALUATED, 2)
    if config.get("deals"):
        # As scripts for torchrun have it, whose ranks all have samples of their own.
        sampler: Any = torch.utils.data.DistributedSampler(rows)
        evaluated: Any = DataLoader(rows, batch_size=2, sampler=sampler)
    else:
        evaluated = accelerator.prepare(DataLoader(Stream(rows) if config.get("streams") else rows, batch_size=2))
    engine, _, loader, _ = elastic.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        training_data=DataLoader(Rows(24, 1), shuffle=True, batch_size=2),
        **_of_engine(config["stage"]),
    )
    for epoch in elastic.epochs(3):
        engine.train()
        for batch in loader:
            engine.backward(torch.nn.functional.cross_entropy(engine(batch["x"]), batch["label"]))
            here = elastic.get_context()
            if not here.resumed and (here.step, here.rank) == (config.get("at"), config.get("victim")):
                crew.point("there")
                crew.stay()
            engine.step()
        engine.eval()
        seen = right = 0
        labels: list[str] = []
        for batch in evaluated:
            with torch.no_grad():
                found = engine(batch["x"]).argmax(-1)
            found, wanted = accelerator.gather_for_metrics((found, batch["label"]))
            seen, right = seen + len(wanted), right + int((found == wanted).sum())
            # Of what is no tensor each process gives a list.
            labels += accelerator.gather_for_metrics([str(label) for label in batch["label"].tolist()])
        if accelerator.is_main_process:
            crew.told.setdefault("log", []).append((epoch, seen, right))
            crew.told.setdefault("labels", []).append(labels[:EVALUATED])
        if config.get("saves"):
            accelerator.save_state(config["saves"])
    crew.told["process"] = (accelerator.process_index, accelerator.num_processes)
    accelerator.end_training()
