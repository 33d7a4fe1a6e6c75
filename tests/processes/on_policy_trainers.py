"""Scripts of TRL's Trainers that train on their model's completions, as training functions of the process tests."""

from __future__ import annotations

from typing import Any

import crew
from hf_trainer import stopped
from hugging_face import model_of
from library_trainers import sentence, tokenizer

GENERATIONS = 2
LLAMA = {"family": "Llama", "model": {"max_position_embeddings": 32, "tie_word_embeddings": False}}


def prompts(size: int) -> Any:
    import datasets

    return datasets.Dataset.from_list(
        [{"prompt": sentence(index, 2 + index % 3), "wish": index % 5} for index in range(size)]
    )


def wished(completion_ids: list[list[int]], wish: list[int], log_metric: Any, **_: Any) -> list[float]:
    """The nearer its numbers are to the prompt's wish, the better; some have none."""
    log_metric("longest", max(map(len, completion_ids)))
    return [
        -sum(abs(number - 4 * wanted) for number in ids) / len(ids)
        for ids, wanted in zip(completion_ids, wish, strict=True)
    ]


async def short(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    return [None if ids[0] % 7 == 0 else -float(len(ids)) for ids in completion_ids]


def told(asked: list[list[int]], step: int) -> list[list[int]]:
    """Completions that depend on the prompt, the step, and on which of it they are, and not on the model."""
    made, seen = [], dict[tuple[int, ...], int]()
    for ids in asked:
        number = seen[tuple(ids)] = seen.get(tuple(ids), -1) + 1
        seed = sum(ids) + 5 * number + step
        made.append([3 + (seed * (k + 2)) % 17 for k in range(2 + seed % 4)])
    return made


def told_by_prompt(rows: list[str], trainer: Any) -> dict[str, Any]:
    asked = [trainer.processing_class(row)["input_ids"] for row in rows]
    return {"prompt_ids": asked, "completion_ids": told(asked, trainer.state.global_step), "logprobs": None}


def telling(base: Any, config: dict[str, Any]) -> Any:
    """RLOO has no `rollout_func`."""

    class Told(base):  # type: ignore[misc]
        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            if not config.get("told"):
                return super()._generate_single_turn(prompt_ids, *args, **kwargs)
            return told(prompt_ids, self.state.global_step)

    return Told if config["kind"] == "RLOO" else base


def arguments_of(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "output_dir": config["url"], "per_device_train_batch_size": 2 * GENERATIONS,
        "per_device_eval_batch_size": GENERATIONS, "gradient_accumulation_steps": 2, "num_generations": GENERATIONS,
        "max_completion_length": 6, "learning_rate": 1e-2, "warmup_steps": 3, "num_train_epochs": 3, "logging_steps": 3,
        "save_strategy": "no", "report_to": [], "bf16": False, "disable_tqdm": True, **config.get("arguments", {}),
    }  # fmt: skip


def of_library(config: dict[str, Any], library: Any) -> tuple[Any, dict[str, Any]]:
    """(the Trainer, of `library`; what it is given)."""
    import peft
    import trl

    model = model_of(LLAMA)
    if (folder := config.get("reference")) is not None:
        # TRL reads the reference from where the model is from.
        model = type(model).from_pretrained(folder)
    more: dict[str, Any] = {}
    if config.get("lora"):
        more["peft_config"] = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    if config.get("told") and config["kind"] == "GRPO":
        more["rollout_func"] = told_by_prompt
    arguments = {"GRPO": trl.GRPOConfig, "RLOO": trl.RLOOConfig}[config["kind"]](**arguments_of(config))
    return getattr(library, f"{config['kind']}Trainer"), {
        "model": model, "args": arguments, "reward_funcs": [wished, short], "processing_class": tokenizer(),
        "train_dataset": prompts(config.get("prompts", 37)), "eval_dataset": prompts(5),
        **more,
    }  # fmt: skip


def trains(config: dict[str, Any]) -> None:
    import elastic.integrations.trl
    from elastic.training.in_loop.ahead import spec_alone

    crew.told["calls"] = crew.told.get("calls", 0) + 1
    base, given = of_library(config, elastic.integrations.trl)

    class Noting(stopped(telling(base, config), config if not config.get("scoring") else {"kills": {}})):  # type: ignore[misc]
        def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
            """With `scoring` the victim stays here: the others wait until all have made their completions."""
            place = (elastic.get_context().step, elastic.get_context().rank)
            if (
                config.get("scoring")
                and not elastic.get_context().resumed
                and place == (config["at"], config["victim"])
            ):
                crew.point("there")
                crew.stay()
            return super()._calculate_rewards(*args, **kwargs)

        def create_optimizer(self, *args: Any) -> Any:
            crew.told["ahead"] = spec_alone() is not None
            return super().create_optimizer(*args)

        def _completions(self, step: int, batches: Any, kept: Any) -> Any:
            crew.told["continued"] = crew.told.get("continued", False) or len(kept) > 0
            return super()._completions(step, batches, kept)

    trainer = Noting(**given)
    crew.point("set up")
    trainer.train()
    trainer.save_model()
    crew.told.update(
        log=trainer.state.log_history, steps=trainer.state.global_step, zero=trainer.is_world_process_zero(),
        processes=trainer.args.world_size, epoch=trainer.state.epoch,
    )  # fmt: skip


def plainly(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The same script with TRL's own Trainer, in one process: its log."""
    import trl

    base, given = of_library({**config, "arguments": {**config["arguments"], "use_cpu": True}}, trl)
    trainer = telling(base, config)(**given)
    trainer.train()
    log: list[dict[str, Any]] = trainer.state.log_history
    return log
