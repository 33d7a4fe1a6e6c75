"""Check, once when the state is opened, that the live engine is partitioned as the pure layouts say."""

from __future__ import annotations

from collections.abc import Sequence

from elastic.core.errors import UsageError
from elastic.core.sharding.layout import Chunk
from elastic.engines.deepspeed.state.zero import ZeroState
from elastic.engines.live_state import Master


def check_layout(state: ZeroState) -> None:
    """Compare every chunk and buffer of this rank with the pure layout.

    Every rank checks its own; each snapshot's manifest is checked to cover the whole state. Raises UsageError naming
    the first difference: resharding by a wrong layout would silently mix up weights.
    """
    for found, taken in state.ranks_of_parts():
        if found != taken:
            raise UsageError(
                f"DeepSpeed cut the parameters for rank {found} where this process is rank {taken} of those that share "
                "them: the state would be carried under another rank's place"
            )
    masters = state.masters()
    expected = state.expected()
    if expected is None:
        return
    live = sorted(chunk for master in masters for chunk in master.chunks)
    pure = sorted(expected.chunks)
    for here, there in zip(live, pure, strict=False):
        if here != there:
            raise _differs(_describe(here), _describe(there))
    if len(live) != len(pure):
        raise _differs(f"{len(live)} chunks on rank {state.rank}", f"{len(pure)}")
    sizes = {master.buffer: master.tensor.numel() for master in masters}
    if sizes != dict(expected.buffers):
        raise _differs(f"flat tensors of {sizes} elements", f"{dict(expected.buffers)}")
    _check_states(masters, state)


def _check_states(masters: Sequence[Master], state: ZeroState) -> None:
    groups = state.base.param_groups
    for master in masters:
        if master.group >= len(groups):
            raise UsageError(
                f"optimizer {type(state.base).__name__} has {len(groups)} parameter groups for tensors of group "
                f"{master.group}: DeepSpeed rebuilt it without them, so its groups cannot be told apart"
            )


def _describe(chunk: Chunk) -> str:
    return f"elements [{chunk.start}, {chunk.stop}) of parameter {chunk.name!r} at {chunk.offset} of {chunk.buffer}"


def _differs(live: str, pure: str) -> UsageError:
    return UsageError(
        f"this DeepSpeed partitions differently from release 0.19.8, which this project follows: {live}, "
        f"expected {pure}"
    )
