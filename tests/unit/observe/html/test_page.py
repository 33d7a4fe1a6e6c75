"""The report as one HTML file: what it shows, that it refers to nothing, that texts of a run cannot break out."""

from __future__ import annotations

import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from sample_journal import journal

from elastic.observe.html.page import page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def steps(first: int, last: int, generation: int, at: float) -> dict[str, Any]:
    found = [
        {
            "step": n,
            "generation": generation,
            "loss": 3 - n / 100,
            "time": at + n / 10,
            "duration_s": 0.1,
            "samples": 24,
        }
        for n in range(first, last + 1)
    ]
    return {"type": "steps", "seq": 90 + generation, "incarnation": 1, "time": at, "steps": found}


def records() -> list[dict[str, Any]]:
    """Step 41 was done twice: in generation 1 and, after the loss of a node, in generation 2."""
    return [*journal(), steps(1, 41, 1, 100.0), steps(41, 60, 2, 112.0)]


class Reader(HTMLParser):
    """Tags, their attributes, and the text between them."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(document)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


def test_what_a_reader_asks_for_is_there() -> None:
    text = Reader(page(records())).text
    for words in (
        "r1", "finished", "Loss", "World size and throughput", "Incidents", "node-lost", "abcdef01",
        "no heartbeat for 1.5 s", "continue with the survivors", "4 -> 3", "Where the time went", "productive",
        "Checkpoints", "c80", "12.3 MB", "2,400",
    ):  # fmt: skip
        assert words in text, words


def test_collectives_are_shown_where_the_journal_has_them() -> None:
    assert "Collectives" not in Reader(page(records())).text
    last = records()[-1]
    rows = [["all_reduce", "dp", "float32", 2, 3e6, 0.0125, 0.01]]
    last["steps"] = [{**step, "collectives": rows} for step in last["steps"]]
    text = Reader(page([*records()[:-1], last])).text
    for words in ("Collectives", "Generation 2, 3 ranks: rank 0", "all_reduce", "3.0 MB", "12.5 ms", "10.0 ms"):
        assert words in text, words


def test_repeated_steps_are_drawn_apart_from_the_final_timeline() -> None:
    tags = Reader(page(records())).tags
    lines = [attributes for tag, attributes in tags if tag == "polyline"]
    (final,) = [line for line in lines if line["class"] == "loss"]
    (repeated,) = [line for line in lines if line["class"] == "abandoned"]
    assert len((final["points"] or "").split()) == 60
    # One step only: a point, drawn as a line of no length.
    assert len(set((repeated["points"] or "").split())) == 1


def test_it_refers_to_nothing_and_runs_nothing() -> None:
    tags = Reader(page(records(), {"name": "gpt"})).tags
    assert not {tag for tag, _ in tags} & {"script", "link", "img", "iframe", "object", "a", "image", "use"}
    assert not [
        name for _, attributes in tags for name in attributes if name.startswith(("on", "src", "href", "xlink"))
    ]


EVIL = "</title></pre></svg><script>alert(1)</script>\"' onload='x"


def test_texts_of_the_run_are_escaped() -> None:
    hostile = records()
    for record in hostile:
        for key in ("evidence", "action", "sentence", "reason", "run_id", "id", "kind"):
            if isinstance(record.get(key), str):
                record[key] = EVIL
    failed = {"type": "event", "event": "UserCodeFailed", "seq": 99, "incarnation": 1, "time": 190.0}
    hostile.append({**failed, "worker": 1, "step": 3, "generation": 1, "error": EVIL, "traceback": EVIL})
    reader = Reader(page(hostile, {EVIL: EVIL, "config": {"note": EVIL}}))
    assert "script" not in {tag for tag, _ in reader.tags}
    assert not [name for _, attributes in reader.tags for name in attributes if name.startswith("on")]
    assert "alert(1)" in reader.text


def test_secrets_of_the_job_are_left_out() -> None:
    job = {
        "config": {"wandb_api_key": "0123456789abcdef0123", "url": "postgres://me:hunter22@db/x", "max_tokens": 4096},
        "submit": {"env_vars": [{"name": "A", "auth_token": "abcdef"}]},
    }
    document = page(records(), job)
    assert "4096" in document
    for secret in ("0123456789abcdef0123", "hunter22", "abcdef&quot;"):
        assert secret not in document


@pytest.mark.parametrize("count", [0, 1, 2, 5, 12])
def test_a_run_that_goes_on_is_shown_as_far_as_it_is_known(count: int) -> None:
    reader = Reader(page(journal()[:count]))
    assert reader.tags[0][0] == "html"
    assert "finished" not in reader.text or count == 12


def test_numbers_that_are_not_finite_do_not_break_a_curve() -> None:
    broken = records()
    broken[-1]["steps"][3]["loss"] = float("nan")
    broken[-1]["steps"][5]["loss"] = None
    document = page(broken)
    assert "nan" not in document.partition("<body>")[2].lower().replace("finance", "")


def test_a_long_run_makes_a_small_file() -> None:
    many = steps(1, 200_000, 1, 0.0)
    assert len(page([*journal(), many])) < 200_000


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian's package chromium)")
def test_a_browser_shows_it(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(page(records(), {"name": "gpt"}), encoding="utf-8")
    assert CHROMIUM is not None
    flags = [
        "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
        "--disable-sync", "--disable-component-update", "--disable-quic", f"--user-data-dir={tmp_path / 'profile'}",
    ]  # fmt: skip
    shown = subprocess.run([CHROMIUM, *flags, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=120)
    reader = Reader(shown.stdout)
    assert [attributes["class"] for tag, attributes in reader.tags if tag == "polyline"].count("loss") == 1
    assert "no heartbeat for 1.5 s" in reader.text
