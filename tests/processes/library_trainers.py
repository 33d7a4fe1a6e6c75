"""Scripts of TRL and PEFT, as training functions of the process tests: their Trainers over elastic's."""

from __future__ import annotations

from typing import Any

import crew
import torch
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
    else:
        rows = [
            {"prompt": sentence(n, 2), "chosen": f" {sentence(n + 100, 3)}", "rejected": f" {sentence(n + 200, 2)}"}
            for n in range(size)
        ]
    return datasets.Dataset.from_list(rows)


def trains(config: dict[str, Any]) -> None:
    """`kind`: SFT or DPO; `lora`: the adapters of PEFT alone."""
    import peft
    import trl

    import elastic
    from elastic.integrations.transformers import Trainer

    crew.told["calls"] = crew.told.get("calls", 0) + 1
    base, arguments = {"SFT": (trl.SFTTrainer, trl.SFTConfig), "DPO": (trl.DPOTrainer, trl.DPOConfig)}[config["kind"]]

    class Elastic(base, Trainer):  # type: ignore[misc, valid-type]
        pass

    class Stopped(Elastic):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            place = (elastic.get_context().step, elastic.get_context().rank)
            if model.training and not elastic.get_context().resumed and place == (config.get("at"), config["victim"]):
                crew.point("there")
                crew.stay()
            return super().compute_loss(model, inputs, *args, **kwargs)

    described = {"family": "Llama", "model": {"max_position_embeddings": 32}}
    # TRL would read it anew from where the model is from.
    reference = {"ref_model": model_of(described)} if config["kind"] == "DPO" and not config.get("lora") else {}
    made = model_of(described)
    adapters = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.1)
    trainer = Stopped(
        model=made,
        args=arguments(
            output_dir=config["url"],
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            warmup_steps=3,
            num_train_epochs=3,
            logging_steps=3,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=5,
            report_to=[],
            bf16=False,
            disable_tqdm=True,
        ),
        train_dataset=dataset(config["kind"], 37),
        eval_dataset=dataset(config["kind"], 10),
        processing_class=tokenizer(),
        peft_config=adapters if config.get("lora") else None,
        **reference,
    )
    crew.point("set up")
    trainer.train()
    trainer.save_model()
    crew.told.update(
        log=trainer.state.log_history, steps=trainer.state.global_step, zero=trainer.is_world_process_zero(),
        processes=trainer.args.world_size, epoch=trainer.state.epoch,
    )  # fmt: skip
