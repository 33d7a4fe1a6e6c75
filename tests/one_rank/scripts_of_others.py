"""Training scripts in the forms that public tutorials have given them: the CIFAR-10 and the masked-words examples of
DeepSpeed, Ray Train's DeepSpeed example, a GPT trainer with a rate set by hand, torch's word language model.

Each calls `deepspeed.initialize`, which is DeepSpeed's own outside of a run and the platform's inside; `prepare` is the
one line that a script with a DataLoader of its own adds, and does nothing outside. `note` takes what is compared.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

Note = Callable[[Any], None]
Prepare = Callable[[Any], Any]

SAMPLES, MICRO = 12, 4
VOCABULARY, LENGTH = 11, 6


class Pictures(Dataset[Any]):
    def __init__(self, seed: int = 3) -> None:
        made = torch.Generator().manual_seed(seed)
        self._pictures = torch.randn(SAMPLES, 1, 6, 6, generator=made)
        self._labels = torch.randint(0, 3, (SAMPLES,), generator=made)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._pictures[index], self._labels[index]


class Words(Dataset[Any]):
    def __init__(self, seed: int = 5) -> None:
        self._words = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._words[index, :-1], "labels": self._words[index, 1:]}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.GroupNorm(2, 4)
        self.pool = nn.MaxPool2d(2)
        self.full = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.full(self.pool(F.relu(self.norm(self.conv(x)))).flatten(1))


class Lm(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.inner = nn.GRU(8, 8, batch_first=True)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.inner(self.embed(input_ids))
        return F.cross_entropy(self.head(self.drop(hidden)).flatten(0, 1), labels.flatten())


def config(stage: int, **more: Any) -> dict[str, Any]:
    sizes = {"train_batch_size": SAMPLES, "train_micro_batch_size_per_gpu": MICRO}
    return {**sizes, "zero_optimization": {"stage": stage}, **more}


def adam(rate: float = 1e-2) -> dict[str, Any]:
    return {"type": "AdamW", "params": {"lr": rate, "torch_adam": True}}


def weights(model: nn.Module) -> dict[str, list[float]]:
    return {name: tensor.detach().flatten().tolist() for name, tensor in model.state_dict().items()}


def image_classifier(note: Note, prepare: Prepare, stage: int, folder: Path, epochs: int) -> None:
    """A tutorial on CIFAR-10: DeepSpeed's arguments, its loader over the dataset, one look at the data before."""
    import deepspeed

    deepspeed.init_distributed()
    if torch.distributed.get_rank() != 0:
        torch.distributed.barrier()
    pictures = Pictures()
    if torch.distributed.get_rank() == 0:
        torch.distributed.barrier()
    first, _ = next(iter(DataLoader(pictures, batch_size=MICRO, shuffle=True)))
    assert len(first) == MICRO
    net = Net()
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed"])
    trained = filter(lambda parameter: parameter.requires_grad, net.parameters())
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": 1e-2}}
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=trained, training_data=pictures,
        config=config(stage, optimizer=adam(), scheduler=scheduler, gradient_clipping=1.0),
    )  # fmt: skip
    criterion = nn.CrossEntropyLoss()
    for _ in range(epochs):
        running = 0.0
        for _, data in enumerate(loader):
            inputs, labels = data[0].to(engine.device), data[1].to(engine.device)
            loss = criterion(engine(inputs), labels)
            engine.backward(loss)
            engine.step()
            running += loss.item()
    correct = 0
    with torch.no_grad():
        for inputs, labels in DataLoader(Pictures(4), batch_size=MICRO):
            correct += int((net(inputs).argmax(1) == labels).sum())
    note({"correct": correct, "running": running / len(loader), **weights(net)})


def masked_words(note: Note, prepare: Prepare, stage: int, folder: Path, epochs: int) -> None:
    """A DataLoader of its own, a number of steps, a checkpoint every second one, with what to go on from."""
    import deepspeed

    loader = prepare(DataLoader(Words(), batch_size=MICRO))
    model = Lm()
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config(stage, optimizer=adam())
    )
    _, client_state = engine.load_checkpoint(load_dir=str(folder))
    begin = client_state["checkpoint_step"] + 1 if client_state else 1
    model.train()
    losses = []

    def batches() -> Iterator[Any]:
        while True:
            yield from loader

    for step, batch in enumerate(batches(), start=begin):
        batch = {name: tensor.to(engine.device) for name, tensor in batch.items()}
        loss = engine(**batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if step % 6 == 0:
            engine.save_checkpoint(save_dir=str(folder), client_state={"checkpoint_step": step})
        if step == 3 * epochs:
            break
    note(weights(model))


def fine_tuning(note: Note, prepare: Prepare, stage: int, folder: Path, epochs: int) -> None:
    """An evaluation after each epoch, whose figure is compared by all ranks, and a checkpoint."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    model = Lm(dropout=0.0)
    engine, _, loader, scheduler = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=Words(),
        config=config(
            stage, optimizer=adam(), scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
            gradient_clipping=True,
        ),
    )  # fmt: skip
    device = get_accelerator().device_name(engine.local_rank)
    evaluated = []
    for _ in range(epochs):
        engine.train()
        for batch in loader:
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            engine.backward(engine(**batch))
            engine.step()
        engine.eval()
        with torch.no_grad():
            found = [engine(**batch) for batch in DataLoader(Words(6), batch_size=MICRO)]
        total = torch.stack(found).mean()
        torch.distributed.all_reduce(total, op=torch.distributed.ReduceOp.MAX)
        evaluated.append(total.item())
        engine.save_checkpoint(str(folder))
        torch.distributed.barrier()
    note({"last": evaluated[-1], "rate": scheduler.get_last_lr(), **weights(model)})


def gpt_by_hand(note: Note, prepare: Prepare, stage: int, folder: Path, epochs: int) -> None:
    """The learning rate is set by hand in each step; one rank estimates the loss every other step."""
    import deepspeed

    model = Lm(dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    loader = prepare(DataLoader(Words(), batch_size=MICRO))
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config(stage, gradient_clipping=1.0)
    )

    def forever() -> Iterator[Any]:
        while True:
            yield from loader

    batches = forever()

    @torch.no_grad()
    def estimate() -> float:
        engine.eval()
        found = [engine(**batch).item() for batch in DataLoader(Words(6), batch_size=MICRO)]
        engine.train()
        return sum(found) / len(found)

    best = math.inf
    step = engine.global_steps
    while step < epochs:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * 0.5 * (1.0 + math.cos(math.pi * step / epochs))
        if step % 2 == 0 and engine.global_rank == 0:
            best = min(best, estimate())
        for _ in range(engine.gradient_accumulation_steps()):
            batch = next(batches)
            loss = engine(batch["input_ids"], batch["labels"])
            engine.backward(loss)
            engine.step()
        step += 1
    note({"estimate": estimate(), **weights(model)})


def word_model(note: Note, prepare: Prepare, stage: int, folder: Path, epochs: int) -> None:
    """torch's own loop: clipping and the scheduler by hand, one call of the scheduler per epoch."""
    import deepspeed

    model = Lm()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8)
    loader = prepare(DataLoader(Words(), batch_size=SAMPLES))
    settings = config(stage, zero_allow_untested_optimizer=True, train_micro_batch_size_per_gpu=SAMPLES)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    for _ in range(epochs):
        model.train()
        for batch in loader:
            loss = engine(**batch)
            engine.backward(loss)
            if stage == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            engine.step()
        scheduler.step()
    note({"rate": scheduler.get_last_lr(), **weights(model)})


SCRIPTS = (image_classifier, masked_words, fine_tuning, gpt_by_hand, word_model)
