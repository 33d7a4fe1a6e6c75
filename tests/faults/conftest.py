"""The clusters of the faults, the run that nothing disturbed, and the table that `make faults` prints."""

from __future__ import annotations

import os
from collections.abc import Iterator

# Before Ray is imported, as for tests/ray.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"

import harness
import pytest
from elastic_cluster import LocalCluster
from judge import WORLD_SIZE, Judge, Row, table

_ROWS = pytest.StashKey[list[Row]]()
_LINES = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_ROWS], config.stash[_LINES] = [], []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if rows := config.stash[_ROWS]:
        terminalreporter.write_line("")
        terminalreporter.write_line(table(rows))
    for line in config.stash[_LINES]:
        terminalreporter.write_line(line)


@pytest.fixture
def lines(pytestconfig: pytest.Config) -> list[str]:
    """What else is printed at the end."""
    return pytestconfig.stash[_LINES]


@pytest.fixture(scope="session")
def judge(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judge]:
    made = Judge(pytestconfig.stash[_ROWS], tmp_path_factory)
    yield made
    made.close()


@pytest.fixture(scope="module")
def nodes() -> Iterator[LocalCluster]:
    """A node for each worker. The control store can be killed. Ray notices a lost node after 3 s, not 14, and one that
    is frozen after 8 s, not 60."""
    noticed = {
        "health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_timeout_ms": 1000,
    }  # fmt: skip
    yield from harness.module_cluster(
        WORLD_SIZE, cpus_per_node=1, durable_control_store=True, system_config=noticed, environment=harness.FORKING
    )


@pytest.fixture
def cluster(nodes: LocalCluster) -> Iterator[LocalCluster]:
    yield from harness.each_test(nodes)
