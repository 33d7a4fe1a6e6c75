"""transformers' Trainer, elastic, beside transformers' own: the same losses, rates and evaluations, line for line.

One rank, in one process; tests/ray/test_transformers.py has several ranks, and kills one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed")
pytest.importorskip("accelerate", reason="the extra `hf` is not installed")

from elastic.checkpoint.storage import CheckpointStore  # noqa: E402
from elastic.comm.rendezvous import host_store  # noqa: E402
from elastic.core.generation_spec import GenerationSpec  # noqa: E402
from elastic.core.settings import AnomalySettings  # noqa: E402
from elastic.training.local import run_local  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

SIZE = 24


class Tokens(torch.utils.data.Dataset[Any]):
    def __init__(self, size: int = SIZE, seed: int = 1) -> None:
        self._tokens = torch.randint(0, 19, (size, 8), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self._tokens[index], "labels": self._tokens[index]}


class Passes(torch.utils.data.IterableDataset[Any]):
    """Without a length, which is what a data source of many files is."""

    def __iter__(self) -> Iterator[Any]:
        return iter([Tokens()[index] for index in range(SIZE)])


def train(of: Any, folder: Path, data: Any = None, **more: Any) -> Any:
    """A script of transformers' Trainer, as it stands in every tutorial; `of` is the Trainer that it imports."""
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 16}
    tokens = {"vocab_size": 19, "max_position_embeddings": 8, "bos_token_id": 1, "eos_token_id": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **tokens))
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "warmup_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        # The platform has an order of its own; this is the dataset's, with both.
        "train_sampling_strategy": "sequential",
    }
    trainer = of(
        model=model,
        args=transformers.TrainingArguments(output_dir=str(folder), **{**arguments, **more}),
        train_dataset=Tokens() if data is None else data,
        eval_dataset=Tokens(10, 2),
    )
    trainer.train()
    return trainer


def plain(folder: Path, **more: Any) -> Any:
    state = train(transformers.Trainer, folder, **more).state
    if torch.distributed.is_initialized():
        # It has made a group of one for itself.
        torch.distributed.destroy_process_group()
    return state


def elastic(folder: Path, seen: list[Any], end_at: int | None = None, **more: Any) -> None:
    """One generation; the next where the folder has a checkpoint."""
    saved = CheckpointStore(str(folder / "run"), "hf").list()
    checkpoint = saved[0].id if saved else None
    spec = GenerationSpec(
        "hf", 1 + len(saved), 0, 1, checkpoint=checkpoint, anomalies=AnomalySettings(),
        engine_config={"zero_optimization": {"stage": 2}}, checkpoint_every_steps=1,
    )  # fmt: skip

    def script() -> None:
        from elastic.integrations.transformers import Trainer

        seen.append(train(Trainer, folder, **more).state)

    result, _ = run_local(script, None, spec, host_store("127.0.0.1"), str(folder / "run"), end_at)
    assert result.kind == ("ended" if end_at else "finished"), result.traceback


def entries(state: Any, *left_out: str) -> list[dict[str, float]]:
    """The log, without what tells the time."""
    speed = ("runtime", "per_second", "total_flos", "preparation_time", *left_out)
    return [
        {key: value for key, value in entry.items() if not any(part in key for part in speed)}
        for entry in state.log_history
    ]


def assert_same(found: Any, wanted: Any, *left_out: str) -> None:
    ours, theirs = entries(found, *left_out), entries(wanted, *left_out)
    assert [sorted(entry) for entry in ours] == [sorted(entry) for entry in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, rel=1e-4), (one, other)


@pytest.mark.parametrize(
    "arguments",
    [
        # transformers evaluates at the end as well. Seen: accelerate moved the model to evaluate it, away from ZeRO.
        {"max_steps": 8, "eval_strategy": "steps", "eval_steps": 3, "eval_on_start": True},
        {"max_steps": 7, "logging_steps": 3, "logging_first_step": True},
        {"num_train_epochs": 2, "eval_strategy": "epoch", "logging_strategy": "epoch"},
        {"num_train_epochs": 1, "max_grad_norm": 0.0, "label_smoothing_factor": 0.1},
    ],
    ids=["steps", "logging", "epochs", "unclipped"],
)
def test_every_line_of_the_log_is_that_of_transformers(arguments: dict[str, Any], tmp_path: Path) -> None:
    wanted = plain(tmp_path / "plain", **arguments)
    found: list[Any] = []
    elastic(tmp_path / "elastic", found, **arguments)
    assert_same(found[0], wanted)


def test_a_recovery_between_two_lines_of_the_log_changes_neither(tmp_path: Path) -> None:
    """Seen: the loss logged next was the mean over the steps since the recovery, as was that of the whole training."""
    arguments: dict[str, Any] = {"max_steps": 8, "logging_steps": 4}
    wanted: list[Any] = []
    elastic(tmp_path / "still", wanted, **arguments)
    found: list[Any] = []
    for end_at in (2, 5, None):
        elastic(tmp_path / "moved", found, end_at, **arguments)
    assert_same(found[0], wanted[0])


# One reader, so that both read in one order; the last step of an epoch is short.
STREAMED: dict[str, Any] = {"per_device_train_batch_size": 5, "gradient_accumulation_steps": 1, "max_steps": 12}


def stream() -> Any:
    from elastic.data import stream as of

    return of(lambda reader, readers: Passes(), repeat=False)


@pytest.mark.parametrize(
    "arguments", [{}, {"eval_strategy": "epoch", "logging_strategy": "epoch"}], ids=["steps", "epochs"]
)
def test_a_stream_is_read_pass_by_pass_to_max_steps(arguments: dict[str, Any], tmp_path: Path) -> None:
    wanted = plain(tmp_path / "plain", data=Passes(), **STREAMED, **arguments)
    found: list[Any] = []
    elastic(tmp_path / "elastic", found, data=stream(), **STREAMED, **arguments)
    assert_same(found[0], wanted)
    assert found[0].num_train_epochs == wanted.num_train_epochs
    assert found[0].epoch == pytest.approx(wanted.epoch)
    moved: list[Any] = []
    for end_at in (2, 5, 7, None):
        elastic(tmp_path / "moved", moved, end_at, data=stream(), **STREAMED, **arguments)
    assert_same(moved[0], wanted)
    assert moved[0].epoch == pytest.approx(wanted.epoch)


def test_hugging_faces_own_iterable_dataset(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the package `datasets` is not installed")
    rows = [{name: value.tolist() for name, value in Tokens()[index].items()} for index in range(SIZE)]
    data = datasets.Dataset.from_list([{**row, "unused": "text"} for row in rows]).to_iterable_dataset(num_shards=3)
    wanted = plain(tmp_path / "plain", data=data, **STREAMED)
    found: list[Any] = []
    for end_at in (4, None):
        elastic(tmp_path / "elastic", found, end_at, data=data, **STREAMED)
    assert_same(found[0], wanted)


@pytest.mark.parametrize(
    ("data", "arguments", "said"),
    [
        (Passes(), STREAMED, "test_transformers.Passes.*use elastic.data.stream"),
        (Passes(), {"num_train_epochs": 1}, "max_steps has to be specified"),
    ],
    ids=["torch's", "no max_steps"],
)
def test_what_cannot_be_read_elastically_is_named(
    data: Any, arguments: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=said):
        elastic(tmp_path, [], data=data, **arguments)
