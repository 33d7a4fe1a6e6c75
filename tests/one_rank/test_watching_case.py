"""The benchmark of what watching costs, without its run of two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.cases import watching
from benchmarks.options import Options
from benchmarks.workload import TINY
from elastic.engines import gradient_squares


def test_what_is_timed_is_what_a_run_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    add = gradient_squares._add

    def counted(squares: dict[str, list[torch.Tensor]], name: str, gradient: torch.Tensor) -> None:
        read.append(name)
        add(squares, name, gradient)

    monkeypatch.setattr(gradient_squares, "_add", counted)
    options = Options(tmp_path, quick=True)
    figures = watching._noise(TINY, options)
    repetitions = options.pick(0, 3) + watching._WARM_UP
    assert len(read) == repetitions * len(set(read))
    assert len(set(read)) > 10
    assert [figure.unit for figure in figures] == ["s", "s", "s", "x"]
    assert [figure.failure for figure in figures] == [""] * 4
    assert watching._call_s(options) > 0
