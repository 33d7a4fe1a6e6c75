"""Trainers that train on their model's completions: what is refused, and what is counted, without processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic.core.errors import UsageError

pytest.importorskip("trl", reason="trl is not installed")


def grpo(**given: Any) -> Any:
    """One whose constructor has not run: its arguments alone."""
    from elastic.integrations.trl import GRPOTrainer

    trainer: Any = object.__new__(GRPOTrainer)
    trainer.num_generations = trainer.num_generations_eval = 4
    known = {
        "per_device_train_batch_size": 8, "per_device_eval_batch_size": 6, "gradient_accumulation_steps": 2,
        "steps_per_generation": 2, "eval_strategy": "no",
    }  # fmt: skip
    trainer.args = SimpleNamespace(**{**known, **given})
    return trainer


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"num_iterations": 2}, "num_iterations=2 is not supported: completions are made for one step"),
        ({"use_vllm": True}, "GRPOTrainer: use_vllm=True is not supported: it has not been run"),
        ({"sync_ref_model": True}, "what it changes from step to step is in no snapshot"),
        ({"scale_rewards": "batch"}, "scale_rewards='batch' is not supported: all completions of a step"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "of a step would be compared at once"),
        ({"steps_per_generation": 4}, "leave steps_per_generation and generation_batch_size out"),
        ({"per_device_train_batch_size": 6}, "per_device_train_batch_size=6 is no multiple of the 4 completions"),
        ({"eval_strategy": "steps"}, "per_device_eval_batch_size=6 is no multiple of the 4 completions"),
    ],
)  # fmt: skip
def test_what_would_depend_on_the_number_of_workers_is_refused(given: dict[str, Any], words: str) -> None:
    from elastic.integrations.trl import _refuse

    _refuse(grpo())
    with pytest.raises(UsageError, match=words):
        _refuse(grpo(**given))


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"sp": 2}, {"ep": 2}, {"tp_sizes": (1, 2)}])
def test_a_mesh_is_refused(mesh: dict[str, Any]) -> None:
    from elastic.core.generation_spec import GenerationSpec
    from elastic.integrations.transformers_arguments import refuse_mesh

    with pytest.raises(UsageError, match=r"elastic\.integrations\.trl's Trainers and `mesh`"):
        refuse_mesh(grpo(), GenerationSpec("run", 1, 0, 4, engine="fsdp2", **mesh))
    # As a run without a mesh has it.
    refuse_mesh(grpo(), GenerationSpec("run", 1, 0, 4, engine="fsdp2", tp_sizes=(1,)))


def test_a_micro_batch_is_as_many_prompts_as_it_has_room_for() -> None:
    assert grpo()._micro_batch_size() == 2


def test_each_prompt_comes_as_often_as_it_has_completions_in_rows_of_their_own() -> None:
    from elastic.integrations.trl import _Repeated

    rows = _Repeated(lambda rows: rows, 2)([{"prompt": "a"}, {"prompt": "b"}])
    rows[0]["reward"] = 1.0
    assert rows == [{"prompt": "a", "reward": 1.0}, {"prompt": "a"}, {"prompt": "b"}, {"prompt": "b"}]


def test_accelerate_trains_alone_for_as_long_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.state import AcceleratorState, DistributedType, PartialState
    from accelerate.utils import gather

    from elastic.integrations.rollouts import alone

    of_three = {"distributed_type": DistributedType.MULTI_CPU, "num_processes": 3, "process_index": 2}
    # Not its constructor, which would make a process group.
    monkeypatch.setattr(PartialState, "_shared_state", {**of_three, "device": torch.device("cpu")})
    monkeypatch.setattr(AcceleratorState, "_shared_state", {})
    with alone():
        state = PartialState()
        assert (state.num_processes, state.process_index, state.is_main_process) == (1, 0, True)
        assert gather(torch.ones(2)).tolist() == [1.0, 1.0]
    assert {name: PartialState._shared_state[name] for name in of_three} == of_three
    assert AcceleratorState._shared_state == {}


def test_a_dataset_is_counted_by_rows_while_it_is_evaluated() -> None:
    from elastic.integrations.rollouts import counted_as

    class Five:
        def __len__(self) -> int:
            return 5

    dataset = Five()
    with counted_as(dataset, 3) as rows:
        assert rows == dataset.total_dataset_length == 15  # type: ignore[attr-defined]
    assert not vars(dataset)
    with counted_as(iter(()), 3) as rows:
        assert rows == float("inf")


@pytest.fixture
def group(tmp_path: Any) -> Any:
    """Of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_step_that_is_gone_on_with_keeps_its_count(group: Any) -> None:
    """Its losses have been divided by it."""
    from elastic.integrations.rollouts import Counts

    device = torch.device("cpu")
    whole = Counts(7.0, 20.0).over_ranks(None, device)
    assert whole == Counts(7.0, 20.0)
    assert Counts(2.0, 5.0).over_ranks(whole, device) == whole


def test_figures_of_a_step_are_means_of_micro_batches_but_for_extremes(group: Any) -> None:
    from elastic.integrations.rollouts import later, one_step

    own = {
        "reward": [1.0, 2.0, float("nan")], "completions/min_length": [3.0, 2.0], "clip_ratio/high_max": [0.1, 0.3],
        "completions/max_terminated_length": [4.0, 9.0], "rewards/minutes/mean": [1.0, 3.0], "kl": [float("nan")],
    }  # fmt: skip
    found = one_step(own)
    assert found.pop("kl") != found.get("kl")
    assert found == {
        "reward": 1.5, "completions/min_length": 2.0, "clip_ratio/high_max": 0.3,
        "completions/max_terminated_length": 9.0, "rewards/minutes/mean": 2.0,
    }  # fmt: skip
    assert later({"reward": [1.0, 2.0], "kl": [3.0]}, {"reward": [1.0]}) == {"reward": [2.0], "kl": [3.0]}
    assert later({"kl": [3.0]}, {"kl": [3.0]}) == {}
