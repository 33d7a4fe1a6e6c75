"""What each tier of communication promises, on the small GPT: two nodes come as far as with exact gradients, or nearly.

The convex problem with a known optimum is in the files of the strategies.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from crew import Crew
from server_ranks import servers

from elastic.core.generation_spec import BatchSettings
from elastic.core.policy.communication import LOSSY
from elastic.core.settings import CommunicationSettings

pytestmark = pytest.mark.processes

STEPS, ROUND, LAST = 120, 10, 20
# A gradient that is late asks for a smaller learning rate.
BRISK, SLOW = 4e-3, 1e-3

# What is granted, the learning rate, and how far above exact gradients the loss may end.
GRANTED = {
    **{name: (CommunicationSettings("error_feedback", name, density=0.05, rank=2), BRISK, 0.2) for name in LOSSY},
    "local_sgd": (CommunicationSettings("local", "local_sgd", every_steps=ROUND), BRISK, 0.2),
    "diloco": (CommunicationSettings("local", "diloco", every_steps=ROUND), BRISK, 0.2),
    "streaming_diloco": (
        CommunicationSettings("local", "streaming_diloco", every_steps=ROUND, fragments=5), BRISK, 0.2,
    ),
    **{
        f"{name}, staleness {staleness}": (
            CommunicationSettings("async", name, staleness=staleness, every_steps=ROUND), lr, limit
        )
        for name in ("bounded_staleness", "parameter_server")
        for staleness, lr, limit in ((0, BRISK, 0.01), (2, SLOW, 0.15))
    },
}  # fmt: skip


def _loss(crew: Crew, url: Path, settings: CommunicationSettings | None, lr: float) -> float:
    """The mean of the last steps."""
    with ExitStack() as stack:
        served = settings is not None and settings.strategy == "parameter_server"
        told = {"servers": [address for address, _ in stack.enter_context(servers(2))]} if served else {}
        outcomes = crew.run(
            (0, 1), "small_gpt.train", {"lr": lr, "url": str(url), **told}, batch=BatchSettings(max_steps=STEPS),
            max_world_size=4, communication=settings, nodes=(0, 1),
        )  # fmt: skip
    assert {outcome.result.kind for outcome in outcomes} == {"finished"}, outcomes[0].result.traceback
    losses = [sum(report.loss for report in at) for at in zip(*(each.reports for each in outcomes), strict=True)]
    assert len(losses) == STEPS
    assert losses[0] > 5.0
    return sum(losses[-LAST:]) / LAST


@pytest.fixture(scope="module")
def exact(crew: Crew, tmp_path_factory: pytest.TempPathFactory) -> dict[float, float]:
    """By learning rate."""
    return {lr: _loss(crew, tmp_path_factory.mktemp("exact"), None, lr) for lr in (BRISK, SLOW)}


@pytest.mark.parametrize("name", GRANTED)
def test_a_small_gpt_comes_nearly_as_far(crew: Crew, tmp_path: Path, exact: dict[float, float], name: str) -> None:
    """The loss of the last 20 of 120 steps. Seen (docs/communication.md): exact 2.72 and, at the slower rate, 3.02."""
    settings, lr, above = GRANTED[name]
    found = _loss(crew, tmp_path, settings, lr)
    assert exact[lr] < 3.1
    assert abs(found - exact[lr]) < above, (found, exact)
