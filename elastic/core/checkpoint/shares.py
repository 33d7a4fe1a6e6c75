"""Names, in a checkpoint, of what error feedback and training in islands keep.

A *residual* is an island's own, and what must survive is the sum over the islands: a restore adds up all that were
saved, and gives each of its islands an equal part. A *basis* is the same on every island, and saved once.

An island that trains by itself has *its own* state: of the optimizer, say. That of the first one is the run's ordinary
state; the others' is under these names. The *outer* state is the same on every island, and saved once.
"""

from __future__ import annotations

_PREFIX = "share/"
_RESIDUAL, _BASIS = f"{_PREFIX}residual/", f"{_PREFIX}basis/"
_ISLAND, _OUTER = f"{_PREFIX}island/", f"{_PREFIX}outer/"


def residual_name(island: int, parameter: str) -> str:
    return f"{_RESIDUAL}{island}/{parameter}"


def basis_name(parameter: str) -> str:
    return f"{_BASIS}{parameter}"


def is_share(name: str) -> bool:
    """No tensor of a model, and none of a registered object, has such a name."""
    return name.startswith(_PREFIX)


def residual_of(name: str) -> tuple[int, str] | None:
    """(island, parameter); None for any other name."""
    if not name.startswith(_RESIDUAL):
        return None
    island, _, parameter = name.removeprefix(_RESIDUAL).partition("/")
    return int(island), parameter


def basis_of(name: str) -> str | None:
    """The parameter; None for any other name."""
    return name.removeprefix(_BASIS) if name.startswith(_BASIS) else None


def island_name(island: int, count: int, kind: str, parameter: str) -> str:
    """Of `count` islands."""
    return f"{_ISLAND}{island}/{count}/{kind}/{parameter}"


def island_of(name: str) -> tuple[int, int, str, str] | None:
    """(island, count, kind, parameter); None for any other name."""
    if not name.startswith(_ISLAND):
        return None
    island, count, kind, parameter = name.removeprefix(_ISLAND).split("/", 3)
    return int(island), int(count), kind, parameter


def outer_name(kind: str, parameter: str) -> str:
    return f"{_OUTER}{kind}/{parameter}"


def outer_of(name: str) -> tuple[str, str] | None:
    """(kind, parameter); None for any other name."""
    if not name.startswith(_OUTER):
        return None
    kind, _, parameter = name.removeprefix(_OUTER).partition("/")
    return kind, parameter
