"""Processes that are expensive to start are started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from crew import Crew


@pytest.fixture(scope="session")
def crew() -> Iterator[Crew]:
    """Four processes for generations of up to four ranks. A test that kills one replaces it."""
    made = Crew(4)
    yield made
    made.close()


@pytest.fixture
def eight() -> Iterator[Crew]:
    """Eight, for one test."""
    made = Crew(8)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def settled(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "crew" in request.fixturenames:
        request.getfixturevalue("crew").settle()
