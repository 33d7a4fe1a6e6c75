"""What an engine does around the process groups of a generation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class GroupHooks(Protocol):
    """What an engine does around the groups of its process. `ProcessGroup` calls it on the training thread:

    1. `device` and `before_join` before the world group exists
    2. `after_join` when it exists, before any other group is made
    3. `destroy_groups` at the end: the engine's own groups and the world group
    """

    def device(self, local_rank: int) -> tuple[str, torch.device]:
        """The backend and the device of this rank: "gloo" and cpu, "nccl" and cuda:N."""
        ...

    def before_join(self) -> None: ...

    def after_join(self, backend: str) -> None: ...

    def destroy_groups(self) -> None:
        """May raise RuntimeError, ValueError or AssertionError where a group is broken."""
        ...
