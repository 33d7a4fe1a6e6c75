"""What a rank of an island trains, by the parameters' names, whatever tensors it lies in."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from elastic.core.errors import UsageError
from elastic.engines.live_state import Master, ShardedState
from elastic.engines.optimizer.state import read_states


class LiveWeights:
    """Implements `elastic.checkpoint.shares.Live`. Raises UsageError where a rank has a part of the state only."""

    def __init__(self, state: ShardedState) -> None:
        if state.zero_stage != 0:
            raise UsageError(
                f"communication: {{semantics: local}} is supported with ZeRO stage 0, not {state.zero_stage}, where a "
                "rank of an island would need the optimizer state of other islands; use stage 0"
            )
        self._state = state

    def weights(self) -> dict[str, Tensor]:
        return {
            name: piece for master in self._state.masters() for name, piece in _pieces(master, master.tensor.detach())
        }

    def moments(self) -> dict[tuple[str, str], Tensor]:
        masters = self._state.masters()
        return {
            (kind, name): piece
            for master, kept in zip(masters, read_states(self._state.base, masters), strict=True)
            for kind, tensor in kept.tensors.items()
            for name, piece in _pieces(master, tensor)
        }

    def changed(self) -> None:
        self._state.finish_install()


def _pieces(master: Master, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    flat = tensor.view(-1)
    for chunk in master.chunks:
        yield chunk.name, flat[chunk.offset : chunk.offset + chunk.numel]
