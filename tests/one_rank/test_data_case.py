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
    assert len(figures) == 17
    peers = [figure for figure in figures if "peer" in figure.name or figure.subject == data.PEER]
    assert len(peers) == 4
    for figure in figures:
        assert figure.values or (figure in peers and find_spec("torchdata") is None), figure
    for name in ("largest state of a reader", "documents that a reader reads again on resume"):
        (figure,) = (figure for figure in figures if figure.name == name)
        assert figure.verdict == "reached"
