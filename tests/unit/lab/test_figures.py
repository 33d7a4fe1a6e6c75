"""The lab's figures are XML in which every text is escaped."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from xml.etree import ElementTree

from lab import figures
from lab_samples import LINK, STEP

HOSTILE = "<script>alert('x')</script> & \"more\""
SIZES = (4096, 65536)


@dataclass(frozen=True)
class Drawn:
    name: str
    summary: dict[str, Any] = field(default_factory=lambda: {"incidents": [{"step": 2, "kind": HOSTILE}]})
    watched: tuple[dict[str, Any], ...] = (STEP, {**STEP, "rank": 1})


def drawn() -> dict[str, str]:
    measured = {
        name: {size: [0.002, 0.001] for size in SIZES} for name in ("pair", "ring", "tree", "hierarchical", "gloo")
    }
    losses = [{1: 0.7, 2: 0.5, 3: 0.4}, {1: 0.7, 2: 0.5, 3: 0.4}]
    return figures.pictures(measured, LINK, (4, 2), [Drawn(HOSTILE), Drawn("stage-3")], losses)


def test_each_figure_is_a_file_of_its_own_without_foreign_markup() -> None:
    found = drawn()
    assert list(found) == ["losses", "all-reduce", f"{HOSTILE}-step-7", "stage-3-step-7"]
    for picture in found.values():
        tree = ElementTree.fromstring(figures.standalone(picture))
        assert {element.tag.rpartition("}")[2] for element in tree.iter()} <= {
            "svg", "style", "rect", "path", "text", "title", "polyline"
        }  # fmt: skip


def test_the_page_shows_what_was_said_as_text() -> None:
    page = figures.page([HOSTILE], drawn())
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 3
    ElementTree.fromstring(page.partition("<body>")[2].partition("</body>")[0])


def test_both_curves_and_what_was_predicted_are_drawn() -> None:
    found = drawn()
    # Two curves and their two keys.
    assert found["losses"].count("<polyline") == 4
    assert found["losses"].count('class="failure"') == 2
    # Four measured, three predicted.
    assert found["all-reduce"].count("<polyline") == 7
    assert found["all-reduce"].count(' formula"') == 3


def test_collectives_that_are_in_flight_together_lie_below_each_other() -> None:
    tree = ElementTree.fromstring(drawn()["stage-3-step-7"])
    flights = [element for element in tree.iter("rect") if element.get("class") == "flight"]
    first, second, *_ = (float(str(element.get("y"))) for element in flights)
    assert first < second
    assert len(flights) == 5
    waited = [float(str(e.get("width"))) for e in tree.iter("rect") if e.get("class") == "waited"]
    assert waited[0] == 0.0
    assert all(width > 0 for width in waited[1:])
