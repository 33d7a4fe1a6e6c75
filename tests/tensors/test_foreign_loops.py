"""Training loops of other libraries inside of a run are refused in one sentence, and work outside of it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastic.core.errors import UsageError
from elastic.core.generation_spec import BatchSettings, GenerationSpec
from elastic.engines import foreign_loops


@pytest.fixture(autouse=True)
def _outside() -> Iterator[None]:
    yield
    foreign_loops.allow()


def library(monkeypatch: pytest.MonkeyPatch, module: str, name: str, method: str) -> type:
    """A stand-in for a library's class, loaded as the library would be."""
    made: Any = type(name, (), {method: lambda self, *_: None} if method != "__init__" else {})
    fake: Any = ModuleType(module)
    setattr(fake, name, made)
    monkeypatch.setitem(sys.modules, module, fake)
    return made


@pytest.mark.parametrize(
    ("module", "name", "method", "words"),
    [
        ("transformers.trainer", "Trainer", "train", "from elastic.integrations.transformers import Trainer"),
        ("accelerate.accelerator", "Accelerator", "prepare", "from elastic.integrations.accelerate import Accelerator"),
        ("accelerate.local_sgd", "LocalSGD", "__init__", "communication: {semantics: local}"),
        ("lightning.pytorch.trainer.trainer", "Trainer", "__init__", "Lightning's Trainer"),
    ],
)
def test_it_is_refused_inside_and_works_outside(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str, method: str, words: str
) -> None:
    made = library(monkeypatch, module, name, method)

    def call() -> None:
        made() if method == "__init__" else getattr(made(), method)()

    foreign_loops.refuse("deepspeed")
    with pytest.raises(UsageError, match="nothing was trained") as raised:
        call()
    assert words in str(raised.value)
    foreign_loops.allow()
    call()


def test_a_library_that_the_function_imports_is_refused_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Seen: `from accelerate import Accelerator` within the function trained each rank for itself, to "finished"."""
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "__init__.py").write_text("from accelerate.accelerator import Accelerator\n")
    body = "class Accelerator:\n    def prepare(self, *_): ...\n"
    (tmp_path / "accelerate" / "accelerator.py").write_text(body)
    for name in [name for name in sys.modules if name.partition(".")[0] == "accelerate"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)

    foreign_loops.refuse("deepspeed")
    made = importlib.import_module("accelerate").Accelerator
    with pytest.raises(UsageError, match="Accelerator does not train elastically"):
        made().prepare()
    # Not by monkeypatch, which would put them back: transformers would find them.
    del sys.modules["accelerate"], sys.modules["accelerate.accelerator"]


def test_accelerate_may_share_out_the_data_of_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen: refused, as if a model were in it."""
    made: Any = library(monkeypatch, "accelerate.accelerator", "Accelerator", "prepare")
    foreign_loops.refuse("deepspeed")
    loader = torch.utils.data.DataLoader([1, 2])
    made().prepare(loader)
    with pytest.raises(UsageError, match=r"elastic\.integrations\.accelerate.*a DataLoader for evaluation"):
        made().prepare(torch.nn.Linear(1, 1), loader)


def test_the_platforms_own_trainer_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = library(monkeypatch, "transformers.trainer", "Trainer", "train")
    ours: Any = type("Ours", (made,), {foreign_loops.OWN: True})
    foreign_loops.refuse("deepspeed")
    ours().train()


def test_wrapping_in_ddp_or_fsdp_is_refused() -> None:
    foreign_loops.refuse("deepspeed")
    with pytest.raises(UsageError, match="engine: fsdp2"):
        FullyShardedDataParallel(torch.nn.Linear(2, 2))
    with pytest.raises(UsageError, match="pass the model to"):
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))


def test_fully_shard_is_refused_but_by_the_engine_that_is_made_of_it() -> None:
    """Seen: such a script trained outside of the platform, and was refused when it had returned."""
    foreign_loops.refuse("deepspeed")
    with pytest.raises(UsageError, match=r"engine: fsdp2.*nothing was trained"):
        fully_shard(torch.nn.Linear(2, 2))
    foreign_loops.refuse("fsdp2")
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        assert isinstance(fully_shard(torch.nn.Linear(2, 2)), FSDPModule)
    finally:
        dist.destroy_process_group()


class TestArguments:
    """`elastic.integrations.transformers_arguments` needs no transformers."""

    def arguments(self, **given: Any) -> Any:
        return SimpleNamespace(
            lr_scheduler_type="linear", max_grad_norm=1.0, bf16=False, fp16=False, per_device_train_batch_size=4,
            gradient_accumulation_steps=2, **given,
        )  # fmt: skip

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ({"deepspeed": "ds.json"}, r"TrainingArguments\.deepspeed is not supported; give the DeepSpeed"),
            ({"push_to_hub": True}, "elastic export RUN --to hf DIR"),
            ({"auto_find_batch_size": True}, "global batch of a run is fixed"),
            ({"train_sampling_strategy": "group_by_length"}, "the platform orders the samples"),
            ({"include_num_input_tokens_seen": "all"}, "the platform counts tokens"),
            ({"enable_jit_checkpoint": True}, "the platform saves and resumes by itself"),
        ],
    )
    def test_what_cannot_be_honoured_is_named(self, given: dict[str, Any], words: str) -> None:
        from elastic.integrations.transformers_arguments import refuse

        trainer = SimpleNamespace(args=self.arguments(**given))
        with pytest.raises(UsageError, match=words):
            refuse(trainer, SimpleNamespace)

    def test_a_loss_that_is_scaled_already_is_named(self) -> None:
        """It would be scaled by the number of micro-batches a second time, without a word."""
        from elastic.integrations.transformers_arguments import refuse

        trainer = SimpleNamespace(args=self.arguments(), loss_is_scaled_for_ga=True)
        with pytest.raises(UsageError, match="compute_loss returns the mean over the micro-batch"):
            refuse(trainer, SimpleNamespace)

    def test_an_override_that_would_not_be_called_is_named(self) -> None:
        from elastic.integrations.transformers_arguments import refuse

        class Theirs:
            args = self.arguments()

            def get_train_dataloader(self) -> None: ...

        class Ours(Theirs):
            pass

        class Users(Ours):
            def get_train_dataloader(self) -> None: ...

        refuse(Ours(), Ours)
        with pytest.raises(UsageError, match="an override of get_train_dataloader is not supported; pass train_datase"):
            refuse(Users(), Ours)

    def test_a_trainer_that_makes_completions_is_pointed_to_the_one_that_does_here(self) -> None:
        from elastic.integrations.transformers_arguments import refuse

        class GRPOTrainer:
            args = self.arguments()

            def _generate_and_score_completions(self) -> None: ...

        class Ours(GRPOTrainer):
            pass

        with pytest.raises(UsageError, match=r"take GRPOTrainer or RLOOTrainer of elastic\.integrations\.trl"):
            refuse(Ours(), Ours)

    def test_a_trainer_of_a_library_comes_before_ours(self) -> None:
        """Behind it, its methods would be hidden: TRL's SFTTrainer would train without its own `training_step`."""
        from elastic.integrations.transformers_arguments import refuse

        class Theirs:
            args = self.arguments()

        class Ours(Theirs):
            pass

        class SFTTrainer(Theirs):
            pass

        class First(SFTTrainer, Ours):
            pass

        class Behind(Ours, SFTTrainer):
            pass

        refuse(First(), Ours)
        with pytest.raises(UsageError, match=r"put it last: class Behind\(SFTTrainer, Trainer\)"):
            refuse(Behind(), Ours)

    def spec(self, **given: Any) -> GenerationSpec:
        return GenerationSpec("run", 1, 0, 2, max_world_size=3, **given)

    def test_the_configuration_is_the_jobs_and_what_it_leaves_open(self) -> None:
        from elastic.integrations.transformers_arguments import engine_config

        config = engine_config(self.arguments(), self.spec(engine_config={"zero_optimization": {"stage": 1}}), 4)
        assert config == {
            "zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0,
        }  # fmt: skip
        job = {"train_batch_size": 64, "gradient_clipping": 0.5}
        assert engine_config(self.arguments(), self.spec(engine_config=job), 4) == {
            **job,
            "train_micro_batch_size_per_gpu": 4,
        }
        with pytest.raises(UsageError, match="per_device_train_batch_size is 4, and train_micro_batch_size_per_gpu"):
            engine_config(self.arguments(), self.spec(engine_config={"train_micro_batch_size_per_gpu": 8}), 4)

    def test_with_fsdp2_too(self) -> None:
        from elastic.integrations.transformers_arguments import engine_config

        plain = {"micro_batch": 4, "global_batch": 24, "gradient_clipping": 1.0}
        assert engine_config(self.arguments(), self.spec(engine="fsdp2"), 4) == plain
        in_bf16 = SimpleNamespace(**{**vars(self.arguments()), "bf16": True})
        assert engine_config(in_bf16, self.spec(engine="fsdp2"), 4) == {**plain, "param_dtype": "bfloat16"}
        given = BatchSettings(global_batch=8)
        assert "global_batch" not in engine_config(self.arguments(), self.spec(engine="fsdp2", batch=given), 4)
        for config, arguments, words in (
            (
                {"micro_batch": 8},
                self.arguments(),
                "per_device_train_batch_size is 4, and micro_batch in the job's `fsd",
            ),
            (
                {"param_dtype": "float32"},
                in_bf16,
                "has bf16, and param_dtype in the job's `fsdp2` is float32",
            ),
            ({}, SimpleNamespace(**{**vars(self.arguments()), "fp16": True}), "fp16 needs a loss scaler"),
        ):
            with pytest.raises(UsageError, match=words):
                engine_config(arguments, self.spec(engine="fsdp2", engine_config=config), 4)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda utils: {"deepspeed_plugin": object()}, r"deepspeed_plugin=.*the job's `deepspeed`"),
        (lambda utils: {"kwargs_handlers": [utils.GradScalerKwargs()]}, "the loss scaler is the engine's"),
        (lambda utils: {"kwargs_handlers": [utils.AutocastKwargs(enabled=False)]}, r"give it to accelerator\.autocast"),
        (
            lambda utils: {
                "kwargs_handlers": [
                    utils.DistributedDataParallelKwargs(comm_hook=utils.DDPCommunicationHookType.BF16),
                ]
            },
            "communication hook bf16 is not supported; the job's `communication`",
        ),
    ],
)
def test_an_accelerators_arguments_that_cannot_be_honoured_are_named(given: Any, words: str) -> None:
    utils = pytest.importorskip("accelerate.utils")
    from elastic.integrations.accelerate_arguments import refuse

    refuse({"cpu": True, "kwargs_handlers": [utils.InitProcessGroupKwargs(), utils.DistributedDataParallelKwargs()]})
    with pytest.raises(UsageError, match=words):
        refuse(given(utils))
