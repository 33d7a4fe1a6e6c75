"""An object of the user's hands that stands for another one, which changes with the generation."""

from __future__ import annotations

from typing import Any


class StandIn:
    """Every attribute, read or written, is the target's; `isinstance` sees the target's class."""

    def __init__(self, target: Any) -> None:
        object.__setattr__(self, "_target", target)

    def stand_in_for(self, target: Any) -> None:
        object.__setattr__(self, "_target", target)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(object.__getattribute__(self, "_target"))

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_target"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "_target"), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(object.__getattribute__(self, "_target"), name)

    def __repr__(self) -> str:
        return repr(object.__getattribute__(self, "_target"))
