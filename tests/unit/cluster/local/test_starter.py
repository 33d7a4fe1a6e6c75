"""What the process that starts nodes says of one that did not start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from elastic_cluster.local import starter


def test_the_last_words_of_a_raylet_are_told_as_its_logs_go_with_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starter._thread, "logs", str(tmp_path), raising=False)
    monkeypatch.setattr(starter._thread, "name", "node-2", raising=False)
    assert starter._last_words() == "it said nothing"
    (tmp_path / "raylet.node-22.err").write_text("of another node\n")
    (tmp_path / "raylet.node-2.1.out").write_text("of its first life\n")
    os.utime(tmp_path / "raylet.node-2.1.out", (1.0, 1.0))
    (tmp_path / "raylet.node-2.2.out").write_text("[I] starting\n[C] the port is taken\n\n")
    (tmp_path / "raylet.node-2.2.err").write_text("\n")
    assert starter._last_words() == "its last words: [C] the port is taken"
    (tmp_path / "raylet.node-2.2.err").write_text("bad option " + "x" * 500)
    assert starter._last_words().startswith("its last words: bad option xxx")
    assert len(starter._last_words()) < 330
