"""Scripts of TRL, PEFT and transformers' own Trainers, as training functions of the process tests."""

from __future__ import annotations

from typing import Any

import crew
import torch
from hf_trainer import stopped
from hugging_face import VOCABULARY, model_of

WORDS = [f"w{number}" for number in range(3, VOCABULARY)]


def tokenizer() -> Any:
    import tokenizers
    import transformers

    known = {word: number for number, word in enumerate(("<pad>", "<bos>", "<eos>", *WORDS))}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="<bos>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def sentence(index: int, length: int) -> str:
    numbers = torch.randint(0, len(WORDS), (length,), generator=torch.Generator().manual_seed(index))
    return " ".join(WORDS[number] for number in numbers.tolist())


def dataset(kind: str, size: int) -> Any:
    import datasets

    rows: list[dict[str, str]]
    if kind == "SFT":
        rows = [{"text": sentence(index, 3 + index % 4)} for index in range(size)]
    elif kind == "Reward":
        rows = [
            {"chosen": sentence(n, 3 + n % 4), "rejected": sentence(n + 200, 3 + n % 3)} for n in range(size)
        ]  # fmt: skip
    else:
        rows = [
            {"prompt": sentence(n, 2), "chosen": f" {sentence(n + 100, 3)}", "rejected": f" {sentence(n + 200, 2)}"}
            for n in range(size)
        ]
    return datasets.Dataset.from_list(rows)


def translations(size: int) -> Any:
    import datasets

    rows = [
        {"input_ids": [3 + (n + k) % 17 for k in range(4)], "labels": [3 + (n + k) % 17 for k in range(2 + n % 3)]}
        for n in range(size)
    ]
    return datasets.Dataset.from_list(rows)


def of_library(config: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """(its Trainer, its arguments, what is given to both), each as in its documentation."""
    import peft
    import transformers
    import trl

    if config["kind"] == "Seq2Seq":
        t5 = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
        torch.manual_seed(3)
        model = transformers.T5ForConditionalGeneration(
            transformers.T5Config(**t5, decoder_start_token_id=0, eos_token_id=2, pad_token_id=0)
        )
        more: dict[str, Any] = {
            "model": model, "data_collator": transformers.DataCollatorForSeq2Seq(tokenizer(), model),
            # As many to the rank, of two as of three: transformers keeps those that fill up the last batch here.
            "train_dataset": translations(37), "eval_dataset": translations(12),
            # Without metrics transformers generates nothing.
            "compute_metrics": lambda found: {"rows": len(found.predictions)},
        }  # fmt: skip
        return transformers.Seq2SeqTrainer, transformers.Seq2SeqTrainingArguments, more
    sizes = {"max_position_embeddings": 32, "tie_word_embeddings": config.get("tied", False)}
    described: dict[str, Any] = {"family": "Llama", "model": sizes}
    if config["kind"] == "Reward":
        described |= {"head": "SequenceClassification", "model": {**described["model"], "num_labels": 1}}
    more = {
        "model": model_of(described), "train_dataset": dataset(config["kind"], 37),
        "eval_dataset": dataset(config["kind"], config.get("evaluates", 10)),
    }  # fmt: skip
    if config.get("lora"):
        more["peft_config"] = peft.LoraConfig(
            r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.1
        )
    elif config["kind"] == "DPO":
        # TRL would read it anew from where the model is from.
        more["ref_model"] = model_of(described)
    kinds = {
        "SFT": (trl.SFTTrainer, trl.SFTConfig), "DPO": (trl.DPOTrainer, trl.DPOConfig),
        "Reward": (trl.RewardTrainer, trl.RewardConfig),
    }  # fmt: skip
    return *kinds[config["kind"]], more


def trains(config: dict[str, Any]) -> None:
    """`kind`: SFT, DPO, Reward or Seq2Seq; `lora`: the adapters of PEFT alone, whose first evaluated are the best."""
    import elastic
    from elastic.integrations.transformers import Trainer

    crew.told["calls"] = crew.told.get("calls", 0) + 1
    base, arguments, given = of_library(config)

    class Elastic(base, Trainer):  # type: ignore[misc, valid-type]
        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            """As if each rank's text came to its end at another length."""
            if config["kind"] == "Seq2Seq":
                kwargs["max_new_tokens"] = 2 + elastic.get_context().rank
            return super().prediction_step(*args, **kwargs)

    trainer = stopped(Elastic, config)(
        args=arguments(
            output_dir=config["url"],
            per_device_train_batch_size=2,
            per_device_eval_batch_size=2,
            gradient_accumulation_steps=config.get("accumulates", 2),
            learning_rate=1e-2,
            warmup_steps=3,
            num_train_epochs=3,
            logging_steps=3,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=2 if config["lora"] else 5,
            load_best_model_at_end=config["lora"],
            metric_for_best_model="eval_loss",
            greater_is_better=True,
            report_to=[],
            bf16=False,
            disable_tqdm=True,
            **({"predict_with_generate": True} if config["kind"] == "Seq2Seq" else {}),
        ),
        processing_class=tokenizer(),
        **given,
    )
    crew.point("set up")
    trainer.train()
    trainer.save_model()
    if config["lora"]:
        crew.told["best"] = trainer.evaluate()["eval_loss"]
    crew.told.update(
        log=trainer.state.log_history, steps=trainer.state.global_step, zero=trainer.is_world_process_zero(),
        processes=trainer.args.world_size, epoch=trainer.state.epoch,
    )  # fmt: skip
