"""Which devices no worker begins on, and what is only worth a line."""

from __future__ import annotations

import pytest

from elastic.core.policy.device_health import DeviceHealth, doubts, unfit

H100 = "NVIDIA H100 80GB HBM3"
GOOD = DeviceHealth(H100, links=18, usual_links=18)


@pytest.mark.parametrize("health", [DeviceHealth(), GOOD, DeviceHealth("Tesla T4")])
def test_a_device_against_which_nothing_is_known_is_fit(health: DeviceHealth) -> None:
    assert (unfit(health), doubts(health)) == (None, ())


@pytest.mark.parametrize(
    ("health", "words"),
    [
        (DeviceHealth(mig=True), "split by MIG.* switch MIG off"),
        (DeviceHealth(remap_failed=True, recovery=1), "can no longer be replaced: have the GPU exchanged"),
        (DeviceHealth(remap_pending=True), "only when it is reset: reset the GPU"),
        (DeviceHealth(recovery=2), "its driver asks for a restart of the node .*Xid"),
        (DeviceHealth(recovery=99), "asks for recovery action 99"),
        (DeviceHealth(H100, links=17, usual_links=18), f"17 of its NVLinks are active, 18 of another {H100}"),
    ],
)
def test_a_device_that_will_not_last_is_refused_with_what_to_do(health: DeviceHealth, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        raise RuntimeError(unfit(health))


def test_what_may_be_old_or_on_purpose_is_told_and_not_refused() -> None:
    """Errors that were contained, a bridge that joins two of three cards, a hot room."""
    health = DeviceHealth(
        H100, uncorrected_errors=2, links=0, usual_links=12, link_recoveries=3, slowdowns=("temperature",)
    )
    assert unfit(health) is None
    assert doubts(health) == (
        "2 uncorrectable memory errors since its driver was loaded",
        "its NVLinks were retrained 3 times after errors",
        f"none of its NVLinks is active, 12 of another {H100} of the node",
        "its clocks are lowered: temperature",
    )
