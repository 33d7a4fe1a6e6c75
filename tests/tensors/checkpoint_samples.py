"""Snapshots for the storage tests: values that depend on kind, name and index, so that every mix-up shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from elastic.checkpoint.snapshot import ShardSnapshot
from elastic.core.sharding.layout import Layout, RankLayout, merged
from elastic.core.sharding.zero import owner_layout, replicated_layout, zero3_layout, zero12_layout

State = Mapping[str, Mapping[str, torch.Tensor]]

GROUPS = [[("emb", 96), ("one", 1), ("layers.2", 49), ("layers.10", 49)], [("seven", 7), ("scale", 1)]]
FROZEN = [("frozen", 30), ("flag", 1)]
SHAPES: dict[str, tuple[int, ...]] = {
    "emb": (12, 8), "one": (1,), "layers.2": (7, 7), "layers.10": (7, 7), "seven": (7,), "scale": (),
    "frozen": (5, 6), "flag": (),
}  # fmt: skip


def state(seed: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    """Kind -> name -> the whole tensor, flattened."""
    generator = torch.Generator().manual_seed(seed)
    names = [tensor for group in GROUPS for tensor in group]
    found = {kind: {n: torch.randn(k, generator=generator) for n, k in names} for kind in ("fp32", "exp_avg")}
    found["exp_avg_sq"] = {name: torch.rand(k, generator=generator).to(torch.bfloat16) for name, k in names}
    found["param"] = {"frozen": torch.randn(30, generator=generator).double()}
    found["buffer"] = {"flag": torch.tensor([True])}
    return found


def written(kind: str, world: int) -> Layout:
    """What each rank writes, under a ZeRO stage."""
    flat = [tensor for group in GROUPS for tensor in group]
    main = {
        "zero12": lambda: zero12_layout(GROUPS, world, round_robin=True),
        "zero3": lambda: zero3_layout(GROUPS, world, 20),
        "zero0": lambda: owner_layout(flat, world),
    }[kind]()
    return _with(main, owner_layout(FROZEN, world))


def wanted(kind: str, world: int) -> Layout:
    """What each rank needs back: as written, but replicated state on every rank."""
    flat = [tensor for group in GROUPS for tensor in group]
    main = {
        "zero12": lambda: zero12_layout(GROUPS, world, round_robin=True),
        "zero3": lambda: zero3_layout(GROUPS, world, 20),
        "zero0": lambda: replicated_layout(flat, world),
    }[kind]()
    return _with(main, replicated_layout(FROZEN, world))


def _with(one: Layout, two: Layout) -> Layout:
    ranks = (merged(first, second) for first, second in zip(one.ranks, two.ranks, strict=True))
    return Layout({**one.numels, **two.numels}, tuple(ranks))


def cut(layout: RankLayout, full: State) -> dict[str, torch.Tensor]:
    """One rank's tensors; padding is not a number, and must never be looked at."""
    tensors: dict[str, torch.Tensor] = {}
    for chunk in layout.chunks:
        for kind, whole in full.items():
            if chunk.name in whole:
                values = whole[chunk.name]
                empty = torch.full((layout.buffers[chunk.buffer],), float("nan")).to(values.dtype)
                buffer = tensors.setdefault(f"{kind}/{chunk.buffer}", empty)
                buffer[chunk.offset : chunk.offset + chunk.numel] = values[chunk.start : chunk.stop]
    for buffer, length in layout.buffers.items():  # a rank that is all padding has its tensors all the same
        if length and not any(key.endswith(f"/{buffer}") for key in tensors):
            tensors.update({f"{kind}/{buffer}": torch.full((length,), float("nan")) for kind in ("fp32", "exp_avg")})
            tensors[f"exp_avg_sq/{buffer}"] = torch.full((length,), float("nan"), dtype=torch.bfloat16)
    return tensors


def snapshots(
    layout: Layout, full: State, *, step: int = 40, generation: int = 3, run_id: str = "run"
) -> Sequence[ShardSnapshot]:
    return [
        ShardSnapshot(
            run_id=run_id,
            generation=generation,
            rank=rank,
            world_size=layout.world_size,
            step=step,
            zero_stage=2,
            layout=own,
            tensors=cut(own, full),
            parameters=SHAPES,
            extra_state={"cursor": step} if rank == 0 else None,
        )
        for rank, own in enumerate(layout.ranks)
    ]


def one_snapshot(**changes: object) -> ShardSnapshot:
    first = snapshots(written("zero12", 1), state())[0]
    return ShardSnapshot(**{**vars(first), **changes})  # type: ignore[arg-type]
