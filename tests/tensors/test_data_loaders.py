"""DataLoaders that scripts bring with them: what is taken over, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from elastic.core.errors import UsageError
from elastic.training.arguments import chosen_config, refuse_arguments
from elastic.training.data.blocks import in_blocks
from elastic.training.data.data_loaders import PreparedLoader, data_source, taken_over

DATA: Any = list(range(12))


class Sorted(RandomSampler):
    """Any order at all, under a known name's subclass."""


class Streamed(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


def _add(items: list[int]) -> int:
    return sum(items)


def _first(worker: int) -> None:
    """For worker_init_fn."""


@pytest.mark.parametrize(
    ("loader", "shuffle"),
    [
        (DataLoader(DATA, batch_size=3), False),
        (DataLoader(DATA, batch_size=3, shuffle=True), True),
        (DataLoader(DATA, batch_size=3, sampler=DistributedSampler(DATA, 2, 0)), True),
        (DataLoader(DATA, batch_size=3, sampler=DistributedSampler(DATA, 2, 1, shuffle=False)), False),
        (DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 3, drop_last=True)), False),
    ],
)
def test_dataset_batch_size_and_shuffling_are_taken_over(loader: DataLoader[Any], shuffle: bool) -> None:
    source = taken_over(loader)
    assert (source.dataset, source.size, source.shuffle, source.micro_batch) == (DATA, 12, shuffle, 3)


def test_collation_and_workers_are_taken_over() -> None:
    loader = DataLoader(DATA, 4, collate_fn=_add, num_workers=2, prefetch_factor=3, worker_init_fn=_first)
    for given in (loader, PreparedLoader(taken_over(loader))):
        source = data_source(given, None, 0, None)
        assert source.collate_fn is _add
        assert (source.num_workers, source.prefetch_factor, source.worker_init_fn) == (2, 3, _first)
    with pytest.raises(UsageError, match=r"collate_fn was given to elastic\.initialize and to the DataLoader"):
        data_source(loader, sum, 0, None)
    with pytest.raises(UsageError, match=r"num_workers was given to elastic\.initialize and to the DataLoader"):
        data_source(loader, None, 1, None)


def test_a_subset_sampler_becomes_a_subset() -> None:
    source = taken_over(DataLoader(DATA, 2, sampler=SubsetRandomSampler([1, 5, 7])))
    assert isinstance(source.dataset, Subset)
    assert (source.size, source.shuffle, [source.dataset[i] for i in range(3)]) == (3, True, [1, 5, 7])


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (
            DataLoader(in_blocks(DATA, 4), 2, sampler=SubsetRandomSampler([1, 2])),
            "a SubsetRandomSampler over blocks",
        ),
        (DataLoader(DATA, 2, sampler=WeightedRandomSampler([1.0] * 12, 12)), "a WeightedRandomSampler, whose order"),
        (DataLoader(DATA, 2, sampler=RandomSampler(DATA, replacement=True)), "RandomSampler with replacement"),
        (DataLoader(DATA, 2, sampler=RandomSampler(DATA, num_samples=5)), "RandomSampler with num_samples=5"),
        (DataLoader(DATA, 2, sampler=Sorted(DATA)), "is a Sorted, whose order cannot be kept"),
        (DataLoader(DATA, 2, sampler=[3, 1]), "is a list, whose order"),
        (DataLoader(DATA, batch_size=None), r"batches are not made \(batch_size=None\)"),
        (DataLoader(DATA, batch_sampler=[[1, 2], [3]]), "batches are made by list"),
        (DataLoader(Streamed(), 2), "is not map-style"),
    ],
)
def test_an_order_that_cannot_be_kept_is_refused_by_name(loader: DataLoader[Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        taken_over(loader)


def test_a_prepared_loader_without_initialize_says_so() -> None:
    prepared = PreparedLoader(taken_over(DataLoader(DATA, 2)))
    for use in (lambda loader: next(iter(loader)), len, lambda loader: loader.epoch):
        with pytest.raises(UsageError, match="prepare_data_loader first, then initialize"):
            use(prepared)  # type: ignore[operator]


class TestArguments:
    def test_the_configuration_may_be_given_by_any_of_three_ways_but_once(self) -> None:
        args = type("Args", (), {"deepspeed_config": "a.json", "local_rank": 0})()
        assert chosen_config(args, None, None) == "a.json"
        assert chosen_config(None, "b.json", None) == "b.json"
        assert chosen_config(None, None, {"x": 1}) == {"x": 1}
        assert chosen_config(None, None, None) is None
        with pytest.raises(UsageError, match=r"given as config and as args\.deepspeed_config"):
            chosen_config(args, {}, None)

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"args": torch.nn.Linear(1, 1), "model": None}, "first argument of elastic.initialize is `args`"),
            ({"model": None}, "needs a model"),
            ({"mpu": object()}, "mpu is not supported"),
            ({"mesh_param": (2, 2)}, "mesh_param is not supported"),
        ],
    )
    def test_what_binds_a_run_to_its_ranks_is_refused_by_name(self, given: dict[str, Any], message: str) -> None:
        arguments = {"args": None, "model": object(), "mpu": None, "mesh_param": None, "distributed_port": 29500}
        with pytest.raises(UsageError, match=message):
            refuse_arguments(**(arguments | given))

    def test_a_port_of_ones_own_is_not_used_and_that_is_said(self, caplog: pytest.LogCaptureFixture) -> None:
        refuse_arguments(None, object(), None, None, 1234)
        assert "distributed_port=1234 is not used" in caplog.text

    def test_the_order_is_that_of_deepspeed(self) -> None:
        import inspect

        import deepspeed

        import elastic

        theirs = list(inspect.signature(deepspeed.initialize).parameters)
        ours = inspect.signature(elastic.initialize).parameters
        assert [name for name, found in ours.items() if found.kind is not found.KEYWORD_ONLY] == theirs


def test_every_sampler_of_torch_is_decided_on() -> None:
    """One more in a new torch must not slip through as unknown without anybody having looked."""
    import torch.utils.data as data

    kinds = {name for name, kind in vars(data).items() if isinstance(kind, type) and issubclass(kind, Sampler)}
    assert kinds == {
        *("BatchSampler", "DistributedSampler", "RandomSampler", "Sampler", "SequentialSampler"),
        *("SubsetRandomSampler", "WeightedRandomSampler"),
    }


def test_samples_in_blocks_are_those_of_the_dataset() -> None:
    blocks = in_blocks(DATA, 4, at_once=2)
    source = data_source(blocks, None, 0, None)
    assert (source.dataset, source.size) == (blocks, 12)
    assert [blocks[index] for index in range(12)] == DATA
    for wrong in ((0, 1), (1, 0)):
        with pytest.raises(UsageError, match="block and at_once must be at least 1"):
            in_blocks(DATA, *wrong)
