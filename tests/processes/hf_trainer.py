"""A script of transformers' Trainer, as a training function of the process tests."""

from __future__ import annotations

from typing import Any

import crew
import optimizers
import torch
from hugging_face import LENGTH, model_of, text
from scheduled import may_stay


class Tokens(torch.utils.data.Dataset[Any]):
    def __init__(self, size: int, length: int = LENGTH) -> None:
        self._size, self._length = size, length

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: words[: self._length] for name, words in zip(("input_ids", "labels"), text(index), strict=True)}


def right(found: Any) -> dict[str, float]:
    """How many tokens were foretold."""
    guessed = found.predictions[:, :-1].argmax(-1)
    return {"right": float((guessed == found.label_ids[:, 1:]).mean()), "places": float(found.predictions.shape[1])}


def stopped(base: Any, config: dict[str, Any]) -> Any:
    """The same Trainer, whose rank `victim` stays in its pass after step `at`, or with `evaluating` in the evaluation
    after the next one, to be killed there; or where `kills` says it."""
    import elastic

    class Stopped(base):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if "kills" in config:
                may_stay(config, "forward" if model.training else "evaluation")
                return super().compute_loss(model, inputs, *args, **kwargs)
            place = (elastic.get_context().step - (not model.training), elastic.get_context().rank)
            here = model.training != config.get("evaluating", False)
            if here and not elastic.get_context().resumed and place == (config.get("at"), config["victim"]):
                crew.point("there")
                crew.stay()
            return super().compute_loss(model, inputs, *args, **kwargs)

    return Stopped


def _count_passes(module: Any) -> None:
    """It has a tensor that is neither a parameter nor a buffer, and is in the state_dict."""

    class Counted(type(module)):  # type: ignore[misc]
        passes = 3.0

        def get_extra_state(self) -> torch.Tensor:
            return torch.tensor([self.passes])

        def set_extra_state(self, state: torch.Tensor) -> None:
            self.passes = float(state)

    module.__class__ = Counted


class MadeOfModel:
    """As transformers' Trainer takes an optimizer that looks at the model: a class whose objects make it."""

    def __call__(self, model: Any, name: str) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = optimizers.of({"optimizer": name}, model.parameters())
        return made


def trains(config: dict[str, Any]) -> None:
    import transformers

    from elastic.engines.model.compiled import graphs
    from elastic.integrations.transformers import Trainer

    crew.told["calls"] = crew.told.get("calls", 0) + 1

    class Best(transformers.trainer_callback.ExportableState, transformers.TrainerCallback):  # type: ignore[misc]
        """A state of a callback's own, which counts what it has seen."""

        def __init__(self) -> None:
            self.evaluations = self.steps = 0

        def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
            self.evaluations += 1

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.steps += 1

        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"evaluations": self.evaluations, "steps": self.steps}}

    model = model_of(config.get("model", {"family": "GPT2", "model": {"resid_pdrop": 0.1}}))
    if config.get("counts"):
        _count_passes(model.transformer.ln_f)
    counting = Best()
    trainer = stopped(Trainer, config)(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=config["url"],
            per_device_train_batch_size=2,
            gradient_accumulation_steps=config.get("accumulates", 2),
            optim=config.get("optim", "adamw_torch"),
            learning_rate=1e-2,
            warmup_steps=3,
            num_train_epochs=3,
            logging_steps=3,
            eval_strategy="no" if config.get("quiet") else config.get("strategy", "steps"),
            eval_steps=2,
            save_strategy="steps" if config.get("best") else "no",
            save_steps=2,
            # The largest is that of the first evaluation.
            load_best_model_at_end=config.get("best", False),
            metric_for_best_model="eval_loss",
            greater_is_better=True,
            save_on_each_node=config.get("each node", False),
            label_smoothing_factor=config.get("smoothing", 0.0),
            report_to=[],
            # A progress bar is made where the training begins, on rank 0 alone.
            disable_tqdm=False,
            torch_compile=config.get("compiled", False),
            torch_compile_backend="aot_eager" if config.get("compiled") else None,
            dataloader_num_workers=config.get("readers", 0),
            dataloader_persistent_workers=bool(config.get("readers")),
        ),
        train_dataset=Tokens(37, config.get("length", LENGTH)),
        eval_dataset=Tokens(config.get("evaluates", 10), config.get("length", LENGTH)),
        compute_metrics=right if config.get("metrics") else None,
        callbacks=[counting],
        optimizer_cls_and_kwargs=(MadeOfModel, {"name": config["optimizer"]}) if "optimizer" in config else None,
    )
    crew.point("set up")
    before = graphs()
    trainer.train()
    if config.get("best"):
        best = trainer.state.best_global_step, trainer.state.best_model_checkpoint
        crew.told["best"] = (*best, trainer.evaluate()["eval_loss"])
    if config.get("saves"):
        # As transformers' examples end, on all ranks.
        trainer.save_model()
        trainer.save_state()
    crew.told["graphs"] = graphs() - before
    crew.told.update(
        log=trainer.state.log_history, steps=trainer.state.global_step, counted=(counting.steps, counting.evaluations),
        zero=trainer.is_world_process_zero(), processes=trainer.args.world_size, epoch=trainer.state.epoch,
    )  # fmt: skip
