"""The scaling policies by name. The name is in the run's settings, so that a replay of the journal decides alike."""

from __future__ import annotations

from collections.abc import Mapping

from elastic.core.errors import UsageError
from elastic.core.policy.measured_scaling import MeasuredScaling
from elastic.core.policy.scaling import EagerScaling, PatientScaling, ScalingPolicy

POLICIES: Mapping[str, ScalingPolicy] = {
    "eager": EagerScaling(),
    "measured": MeasuredScaling(),
    "patient": PatientScaling(),
}


def policy_named(name: str) -> ScalingPolicy:
    """Raises UsageError for a name that is not registered."""
    if name not in POLICIES:
        raise UsageError(f"there is no scaling policy {name!r}; there are: {', '.join(sorted(POLICIES))}")
    return POLICIES[name]
