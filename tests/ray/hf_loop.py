"""A script of transformers' Trainer, elastic by its import line: what tests/ray/test_transformers.py runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

from elastic.integrations.transformers import Trainer


class Tokens(torch.utils.data.Dataset[Any]):
    def __init__(self, size: int, seed: int) -> None:
        self._tokens = torch.randint(0, 19, (size, 8), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self._tokens[index], "note": "not an argument of the model"}


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    tokens = torch.stack([sample["input_ids"] for sample in samples])
    return {"input_ids": tokens, "labels": tokens}


class Penalised(Trainer):
    """A loss of the user's own."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        loss = outputs.loss + 0.01 * outputs.logits.float().pow(2).mean()
        return (loss, outputs) if return_outputs else loss


class Counting(TrainerCallback):
    steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        Counting.steps += 1


def main(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=19, n_positions=8))
    arguments = TrainingArguments(
        output_dir=config["folder"],
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        warmup_steps=3,
        max_steps=config["steps"],
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=5,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Penalised(
        model=model,
        args=arguments,
        train_dataset=Tokens(240, 1),
        eval_dataset=Tokens(10, 2),
        data_collator=collate,
        callbacks=[Counting()],
    )
    result = trainer.train()
    Path(config["folder"], f"{config['name']}.rank{arguments.process_index}").touch()
    if trainer.is_world_process_zero():
        out = {"steps": result.global_step, "log": trainer.state.log_history, "counted": Counting.steps}
        Path(config["folder"], f"{config['name']}.json").write_text(json.dumps(out))
