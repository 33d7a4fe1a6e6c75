"""A script of TRL's GRPOTrainer, elastic by its import line: what tests/ray/test_transformers.py runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import tokenizers
import torch
import transformers
from trl import GRPOConfig

from elastic.integrations.trl import GRPOTrainer

WORDS = ["<pad>", "<bos>", "<eos>", *(f"w{number}" for number in range(29))]


def low_and_long(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(number < 12 for number in ids) / len(ids) + len(ids) / 8 for ids in completion_ids]


def main(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    known = {word: number for number, word in enumerate(WORDS)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="<bos>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    trainer = GRPOTrainer(
        model=transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**sizes, vocab_size=32, bos_token_id=1, eos_token_id=2, pad_token_id=0)
        ),
        reward_funcs=low_and_long,
        args=GRPOConfig(
            output_dir=config["folder"],
            per_device_train_batch_size=4,
            num_generations=4,
            gradient_accumulation_steps=2,
            max_completion_length=8,
            learning_rate=5e-3,
            max_steps=config["steps"],
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            bf16=False,
            disable_tqdm=True,
        ),
        train_dataset=datasets.Dataset.from_list([{"prompt": f"w{n % 29} w{n * 7 % 29}"} for n in range(96)]),
        processing_class=transformers.PreTrainedTokenizerFast(
            tokenizer_object=made, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
        ),
    )
    result = trainer.train()
    if trainer.is_world_process_zero():
        out = {"steps": result.global_step, "log": trainer.state.log_history}
        Path(config["folder"], f"{config['name']}.json").write_text(json.dumps(out))
