"""Whether registered objects have the same state on every rank: rank 0's is the run's, and differences are named."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping

import xxhash

from elastic.comm.agreement import Agreement
from elastic.core.errors import UsageError
from elastic.training.scope import GenerationScope
from elastic.training.state.verify_weights import MASK63, fingerprint
from elastic.training.user.objects import ObjectState, read
from elastic.training.user.state import State

logger = logging.getLogger(__name__)


class Comparison:
    """Called by every rank at the same moments; names each object once. Where ranks share layers, objects may be of
    their slices: `agreement` is that of the ranks with the same ones."""

    def __init__(self, scope: GenerationScope, user: State, agreement: Agreement) -> None:
        self._scope = scope
        self._user = user
        self._agreement = agreement
        self._named: set[str] = set()

    def __call__(self) -> None:
        """Collective. Raises UsageError on every rank where ranks have registered different objects."""
        if self._scope.spec.world_size == 1:
            return
        differing = [name for name in unlike(self._user.capture(), self._agreement) if name not in self._named]
        # Of a group that was aborted meanwhile, the answer may be wrong.
        self._scope.check()
        self._named.update(differing)
        if differing and self._agreement.rank == 0:
            logger.warning(
                "the ranks' states of %s differ; rank %d's is saved, and every rank gets it after a recovery",
                ", ".join(map(repr, differing)),
                self._scope.spec.rank,
            )


def unlike(objects: Mapping[str, ObjectState], agreement: Agreement) -> list[str]:
    """Names of registered objects whose state differs between ranks. Collective.

    Raises UsageError on every rank where ranks have registered other objects than rank 0.
    """
    hashes = {name: _hash(saved) for name, saved in objects.items()}
    whole = _hash_text(repr(hashes))
    low, high = agreement.least([whole, -whole])
    if low == -high:
        return []
    names = _hash_text(repr([*hashes]))
    low, high = agreement.least([names, -names])
    if low != -high:
        raise UsageError(
            f"rank {agreement.rank} has registered {', '.join(hashes) or 'nothing'} with elastic.state, and another "
            "rank other objects: register the same names in the same order on every rank"
        )
    _, differing = agreement.any_and_unequal([], list(hashes.values()))
    return [name for name, flag in zip(hashes, differing, strict=True) if flag]


def fingerprints(user: State) -> dict[str, int]:
    """Of each value and each registered object as it is now, by what a message calls it. Raises UsageError for what
    cannot be kept."""
    values = {f"elastic.state[{key!r}]": _hash_text(json.dumps(value)) for key, value in user.dump().items()}
    return values | {f"the registered {name!r}": _hash(read(name, target)) for name, target in user.objects.items()}


def _hash(saved: ObjectState) -> int:
    tensors = [fingerprint(tensor) for tensor in saved.tensors]
    return _hash_text(repr((saved.kind, saved.values, tensors)))


def _hash_text(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode()) & MASK63
