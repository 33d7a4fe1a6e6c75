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


# Of these, whose update depends on nothing but the tensor, its gradient, and state made of tensors.
_TENSOR_BY_TENSOR = frozenset(
    {"adafactor", "came", "fusedlamb", "lamb", "lars", "muon", "muonwithauxadam", "shampoo", "soap"}
)


def refuse_beyond_tensors(name: str) -> None:
    """Raise UsageError for an optimizer class, in any case of letters, that not even a step of whole tensors, one by
    one, would leave as it is."""
    why = _WHOLE_TENSOR.get(name.lower())
    if why is not None and name.lower() not in _TENSOR_BY_TENSOR:
        raise UsageError(
            f"optimizer {name} cannot be used with the fsdp2 engine here: {why}, and its state is more than tensors, "
            "or its step depends on several parameters; use AdamW, Adafactor, Muon or another optimizer that steps "
            "each tensor by itself"
        )


def refuse_whole_tensor(name: str) -> None:
    """Raise UsageError for an optimizer class, in any case of letters, that ZeRO's stages 1 to 3 would falsify."""
    why = _WHOLE_TENSOR.get(name.lower())
    if why is not None:
        more = ", or engine: fsdp2, which steps it on whole tensors" if name.lower() in _TENSOR_BY_TENSOR else ""
        raise refused(name, why, more)


def refused(name: str, why: str, more: str = "") -> UsageError:
    return UsageError(
        f"optimizer {name} cannot be used with ZeRO stages 1 to 3 here: {why}, and ZeRO cuts tensors at places that "
        "depend on the world size; use AdamW or another optimizer that updates every weight by itself, or stage 0"
        + more
    )
