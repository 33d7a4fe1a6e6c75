"""FLOPs of real passes: those of the model's matrices, in every engine, and training is the same bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from crew import Crew
from test_gradient_noise import ENGINES, EPOCHS, _run
from test_oracle import Run, _distance
from torch.utils.flop_counter import FlopCounterMode

from elastic.engines import flop_count
from elastic.engines.flop_count import FlopCount

pytestmark = pytest.mark.processes

# Of `trainings.Small`: two matrices forward, both again for their own gradients, the second one for its input's.
MATRICES = (2 * 16 * 16, 2 * 16 * 3)
SAMPLE_FLOPS = 2 * sum(MATRICES) + MATRICES[1]


@pytest.fixture(scope="module", autouse=True)
def _never_compiled(crew: Crew) -> None:
    """A process in which something was compiled counts nothing; other tests do so in the crew's."""
    crew.replace(0)


@pytest.mark.parametrize("name", ENGINES)
def test_flops_are_counted_once_and_change_nothing(crew: Crew, tmp_path: Path, name: str) -> None:
    runs = []
    for fn in ("train", "noisy.train_uncounted"):
        outcomes = _run(crew, tmp_path / fn, {**ENGINES[name], "dropout": 0.1}, fn=fn, batch=EPOCHS)
        runs.append(Run(tmp_path / fn, [outcomes]))
        counted = {
            (rank, report.step): report.sample_flops
            for rank, outcome in enumerate(outcomes)
            for report in outcome.reports
            if report.sample_flops
        }
        assert counted == ({(0, 1): SAMPLE_FLOPS} if fn == "train" else {})
    assert _distance(runs[0].state, runs[1].state) == 0.0
    assert runs[0].losses == runs[1].losses


class _Engine:
    """As much of an engine as is asked for."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def leaves(self) -> dict[str, torch.Tensor]:
        return dict(self.module.named_parameters())


def _pass(count: FlopCount, module: torch.nn.Module) -> None:
    x = torch.randn(2, 5, 8)
    with count.forward():
        loss = module(x).square().mean()
    with count.backward():
        loss.backward()


def test_the_count_is_that_of_torchs_own_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flop_count, "compiles", lambda: False)
    module = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    count = FlopCount(_Engine(module))  # type: ignore[arg-type]
    _pass(count, module)
    with FlopCounterMode(display=False) as torchs:
        module(torch.randn(2, 5, 8)).square().mean().backward()
    assert count.of_sample(2, 0, 1) == torchs.get_total_flops() / 2 > 0
    assert count.of_sample(2, 0, 4) == 2 * torchs.get_total_flops(), "four ranks share each sample"


def test_an_estimate_is_of_what_is_trained_and_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flop_count, "compiles", lambda: True)
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 3))
    module[0].weight.requires_grad_(False)
    engine = _Engine(module)
    engine.leaves = lambda: {n: p for n, p in module.named_parameters() if p.requires_grad}  # type: ignore[method-assign]
    count = FlopCount(engine)  # type: ignore[arg-type]
    _pass(count, module)
    assert count.of_sample(2, 10, 1) == -6 * (8 + 8 * 3 + 3) * 5
    assert count.of_sample(2, 0, 1) == 0.0


def test_a_formula_that_fails_ends_the_count_and_not_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object, **__: object) -> int:
        raise AssertionError("what shape is this")

    monkeypatch.setattr(flop_count, "compiles", lambda: False)
    monkeypatch.setitem(flop_count.flop_registry, torch.ops.aten.addmm, fails)
    module = torch.nn.Linear(8, 8)
    count = FlopCount(_Engine(module))  # type: ignore[arg-type]
    _pass(count, module)
    assert count.of_sample(2, 10, 1) == 0.0
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("the FLOPs of the model are not counted: aten.addmm")
