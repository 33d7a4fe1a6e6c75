"""What the process that starts nodes says of one that did not start."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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


def test_the_failed_check_of_a_crash_is_told_and_not_the_last_address_of_its_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starter._thread, "logs", str(tmp_path), raising=False)
    monkeypatch.setattr(starter._thread, "name", "node-2", raising=False)
    (tmp_path / "raylet.node-2.err").write_text(
        "[C] main.cc:1: Check failed: the port is taken\n*** StackTrace Information ***\nraylet(+0x263c)\n"
    )
    assert starter._last_words() == "its last words: [C] main.cc:1: Check failed: the port is taken"


@pytest.mark.parametrize("crashes", [1, 2])
def test_a_raylet_that_crashes_before_it_has_registered_is_started_once_more(
    crashes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def node(parameters: Any, **_: Any) -> Any:
        given.append(parameters)
        parameters.metrics_agent_port = 1000 + len(given)  # as Ray does
        if len(given) <= crashes:
            raise ChildProcessError("its raylet ended before it had registered")
        raylet = SimpleNamespace(process=SimpleNamespace(pid=os.getpid()))
        return SimpleNamespace(node_id="ab", gcs_address="127.0.0.1:1", all_processes={"raylet": [raylet]})

    monkeypatch.setattr(starter, "_LeanNode", node)
    request = {"start": "node-1", "head": False, "tag": {}, "options": {}}
    if crashes == 1:
        assert starter._start_node(request, "/tmp")["started"] == "node-1"
    else:
        with pytest.raises(ChildProcessError, match="before it had registered"):
            starter._start_node(request, "/tmp")
    assert len(given) == 2
    assert given[0] is not given[1]
