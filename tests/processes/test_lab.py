"""The lab on real processes: all-reduce by hand is torch's, the hub that does not answer, and what training writes
down."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lab_ranks
import pytest
import torch
import yaml
from crew import Crew
from lab import hub
from lab.allreduce import on_ranks
from lab.classifier import Shape, build
from lab.costs import hierarchical, payload, ring, tree
from lab.prepare import prepare

from elastic.checkpoint.storage import CheckpointStore
from elastic.core.generation_spec import BatchSettings
from elastic.planner.model_shape import Tensors
from elastic.planner.states import FP32_ADAM, state_bytes

pytestmark = pytest.mark.processes

JOB = yaml.safe_load((Path(__file__).parents[2] / "examples" / "lab.yaml").read_text())
LENGTHS = (1, 2, 3, 7, 1021)
NODES = {2: (1, 2), 3: (1, 3), 4: (1, 2, 4)}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_reduce_by_hand_is_torchs(ranks: int) -> None:
    found = on_ranks(ranks, lab_ranks.compare, NODES[ranks], LENGTHS)
    assert len(found[0]) == len(LENGTHS) * (2 + len(NODES[ranks]))
    for outcomes in zip(*found, strict=True):
        name, length = outcomes[0]["name"], outcomes[0]["length"]
        assert all(outcome["equal"] for outcome in outcomes), (name, length)
        sent = [outcome["sent"] for outcome in outcomes]
        # All together send what reduces and spreads each element once per rank but one, whatever the algorithm.
        assert sum(count for _, count in sent) == 2 * (ranks - 1) * 4 * length, (name, length)
        if length < ranks:
            continue
        size = 4 * length
        if name == "tree":
            # Whole tensors; the root's messages down are those of the longest chain.
            assert 2 * sent[0][0] == tree(ranks, size).messages
        else:
            cost = ring(ranks, size) if name == "ring" else hierarchical(ranks, int(name.split()[1]), size)
            assert {messages for messages, _ in sent} == {cost.messages}
            assert sum(count for _, count in sent) == pytest.approx(ranks * cost.bytes)


def test_a_rank_that_fails_ends_the_others() -> None:
    with pytest.raises(RuntimeError, match="a process of the all-reduce has failed"):
        on_ranks(2, lab_ranks.one_fails)


def test_nodes_are_equally_large_and_times_are_of_every_repetition() -> None:
    assert on_ranks(3, lab_ranks.refused) == ["3 ranks are not nodes of 2"] * 3
    found = on_ranks(4, lab_ranks.few_times)
    assert found[0].keys() == {"pair", "ring", "tree", "hierarchical", "gloo"}
    assert all(len(seconds) == 2 for by_size in found[0].values() for seconds in by_size.values())
    assert found[0] == found[3], "the slowest rank's time is everybody's"


# -- the hub -----------------------------------------------------------------------------------------------------------

HUBS = {
    "unreachable": "def load_dataset(*args, **kwargs): raise ConnectionError('no route to the hub')",
    "silent": "import threading\ndef load_dataset(*args, **kwargs): threading.Event().wait()",
    "there": """
def load_dataset(path, name, split):
    assert (path, name) == ("nyu-mll/glue", "sst2"), (path, name)
    count = int(split.removeprefix("train[:").removesuffix("]"))
    return {"sentence": [f"film number {i}" for i in range(count)], "label": [i % 2 for i in range(count)]}
""",
}

TRANSFORMERS = """
import pathlib
class AutoTokenizer:
    @classmethod
    def from_pretrained(cls, name):
        assert name == "distilbert-base-uncased"
        return lambda texts, padding, truncation, max_length: {
            "input_ids": [[101, len(text.split())] + [0] * (max_length - 2) for text in texts]}
class DistilBertForSequenceClassification:
    @classmethod
    def from_pretrained(cls, name, num_labels):
        found = cls()
        found.said = f"{name} {num_labels}"
        return found
    def save_pretrained(self, folder):
        pathlib.Path(folder).mkdir()
        (pathlib.Path(folder) / "weights").write_text(self.said)
"""


@pytest.fixture
def hub_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A `datasets` package that answers as told, in this process and in those that it starts."""

    def install(what: str) -> Path:
        package = tmp_path / "stub" / "datasets.py"
        package.parent.mkdir()
        package.write_text(HUBS[what])
        monkeypatch.syspath_prepend(package.parent)
        monkeypatch.setenv("PYTHONPATH", str(package.parent), prepend=":")
        return tmp_path

    return install


@pytest.mark.parametrize(
    ("what", "wait_s", "why"),
    [
        ("unreachable", 60.0, "the hub could not be read: ConnectionError: no route to the hub"),
        ("silent", 0.5, "the hub has not given sst2 within 0.5 s"),
    ],
)
def test_without_a_hub_sentences_are_made_and_it_is_said(hub_is: Any, what: str, wait_s: float, why: str) -> None:
    folder, said = hub_is(what), []
    found = prepare(folder, {**JOB["config"], "sentences": 50}, 24, False, wait_s, said.append)
    assert said[0] == f"no SST-2: {why}"
    assert said[1].startswith("data: 50 sentences made by rules, for example")
    data = json.loads(Path(found.config["data"]).read_text())
    # Whole batches.
    assert (found.count, len(data["ids"]), len(data["labels"])) == (48, 48, 48)


def test_the_hubs_sentences_are_taken_where_it_answers(hub_is: Any) -> None:
    folder, said = hub_is("there"), []
    found = prepare(folder, {**JOB["config"], "sentences": 48}, 24, False, 60.0, said.append)
    assert said[0].startswith("data: the first 48 sentences of SST-2, from the hub")
    data = json.loads(Path(found.config["data"]).read_text())
    assert data["labels"] == [0, 1] * 24
    assert len({tuple(ids) for ids in data["ids"]}) > 40


def test_the_pretrained_model_and_its_tokens_come_along(hub_is: Any) -> None:
    folder = hub_is("there")
    (folder / "stub" / "transformers.py").write_text(TRANSFORMERS)
    found = hub.fetch(folder / "out.json", 6, 60.0, folder / "model", 5)
    assert found["ids"] == [[101, 3, 0, 0, 0]] * 6
    assert (folder / "model" / "weights").read_text() == "distilbert-base-uncased 2"


def test_a_package_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(hub.NotReached, match=r"the package datasets is not installed \(pip install datasets\)"):
        hub.fetch(tmp_path / "out.json", 8, 1.0, None, 24)


# -- training ----------------------------------------------------------------------------------------------------------


def test_the_default_shape_is_distilberts() -> None:
    """66,955,010 parameters: what transformers 5.23 counts for DistilBertForSequenceClassification with two labels."""
    with torch.device("meta"):
        assert sum(p.numel() for p in build(Shape()).parameters()) == 66_955_010


CASES = [
    (0, {}, 1),
    (3, {}, 1),
    # Weights that are released after each use are gathered for the forward and for the backward pass.
    (3, {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}, 2),
]


@pytest.mark.parametrize(("stage", "zero", "gathers"), CASES)
def test_each_collective_is_told_and_adds_up_to_the_ledger(
    crew: Crew, tmp_path: Path, stage: int, zero: dict[str, Any], gathers: int
) -> None:
    """Three ranks in one generation, two in the next: the function stays in its loop, and goes on to be told."""
    small = {"width": 32, "layers": 2, "heads": 2, "vocabulary": 256, "sentences": 240}
    config = {**JOB["config"], **small, "url": str(tmp_path), "folder": str(tmp_path), "watched_steps": [2, 4]}
    settings = {**JOB["deepspeed"]["zero_optimization"], "stage": stage, "reduce_bucket_size": 9000, **zero}
    more: dict[str, Any] = {
        "engine_config": {**JOB["deepspeed"], "zero_optimization": settings},
        "batch": BatchSettings(max_steps=4),
        "max_world_size": 3,
    }
    config["in_loop"] = True
    first = crew.run([0, 1, 2], "lab.train.train", config, end_at=2, **more)
    assert first[0].result.kind == "ended", first[0].result.traceback
    # It would stay in this test's loop.
    crew.replace(2)
    store = CheckpointStore(str(tmp_path), "run")
    second = crew.run([0, 1], "lab.train.train", config, checkpoint=store.list()[0].id, **more)
    assert second[0].result.kind == "finished", second[0].result.traceback
    tensors = [p.numel() for p in build(Shape.of(config)).parameters()]
    for outcomes, ranks, micro_batches in ((first, 3, 2), (second, 2, 3)):
        lines = [line for line in _watched(tmp_path) if line["world_size"] == ranks]
        assert sorted(line["rank"] for line in lines) == list(range(ranks))
        expected = payload(tensors, stage, ranks, micro_batches)
        if stage == 3:
            expected["all_gather_into_tensor"] *= gathers
        told: dict[str, int] = {}
        for call in next(line for line in lines if line["rank"] == 0)["calls"]:
            told[call["op"]] = told.get(call["op"], 0) + call["bytes"]
        assert told == expected
        assert told == {use.op: use.bytes for use in outcomes[0].reports[-1].collectives}
        held = vars(state_bytes([[Tensors(numel) for numel in tensors]], stage, ranks, FP32_ADAM))
        assert [line["memory"] for line in lines] == [held] * ranks


def _watched(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("sync-rank*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]
