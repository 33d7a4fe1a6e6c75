"""Optimizers that look at a whole tensor, by name. No torch: a job's checks ask before anything is started."""

from __future__ import annotations

from elastic.core.errors import UsageError

# Not left to a trial: some of them would need gigabytes for a flat tensor.
_WHOLE_TENSOR = {
    "adafactor": "it factors each matrix and clips by the tensor's norm",
    "adalomo": "it factors each matrix and clips by the tensor's norm",
    "came": "it factors each matrix",
    "dadaptadam": "it estimates one step size from all weights",
    "distributedshampoo": "it preconditions whole matrices",
    "fusedlamb": "its step is scaled by the norm of each tensor",
    "galoreadamw": "it projects whole matrices",
    "lamb": "its step is scaled by the norm of each tensor",
    "lars": "its step is scaled by the norm of each tensor",
    "lbfgs": "it takes products over all weights",
    "muon": "it orthogonalises whole matrices",
    "muonwithauxadam": "it orthogonalises whole matrices",
    "prodigy": "it estimates one step size from all weights",
    "shampoo": "it preconditions whole matrices",
    "soap": "it preconditions whole matrices",
}


def refuse_whole_tensor(name: str) -> None:
    """Raise UsageError for an optimizer class, in any case of letters, that ZeRO's stages 1 to 3 would falsify."""
    why = _WHOLE_TENSOR.get(name.lower())
    if why is not None:
        raise refused(name, why)


def refused(name: str, why: str) -> UsageError:
    return UsageError(
        f"optimizer {name} cannot be used with ZeRO stages 1 to 3 here: {why}, and ZeRO cuts tensors at places that "
        "depend on the world size; use AdamW or another optimizer that updates every weight by itself, or stage 0"
    )
