"""The benchmark of loading comes to its end: every figure is there, the peer's only where the peer is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.cases import data
from benchmarks.options import Options

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore")]


def test_every_figure_is_measured(tmp_path: Path) -> None:
    figures = data.measure(Options(tmp_path, quick=True))
    assert len(figures) == 8
    peers = [figure for figure in figures if "peer" in figure.name or figure.subject == data.PEER]
    assert len(peers) == 2
    for figure in figures:
        assert figure.values or (figure in peers and find_spec("torchdata") is None), figure
    (state,) = (figure for figure in figures if figure.name == "state of a reader")
    assert state.verdict == "reached"
