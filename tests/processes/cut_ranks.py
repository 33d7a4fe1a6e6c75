"""What AutoTP leaves on parameters as a record of their cuts, of layers of every kind: unmodified AutoTP under torch's
fake process group, all ranks of a cell one after another.

Run as a program it writes, as JSON, a verdict for every check below; see `deepspeed_ranks`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed_ranks

from elastic.core.errors import UsageError

SIZES = (2, 3, 4)
DTYPES = ("float32", "bfloat16")
# Outputs, inputs, how AutoTP is told to cut; None: it is not.
LAYERS: dict[str, tuple[int, int, dict[str, Any] | None]] = {
    "q_proj": (97, 24, {"partition_type": "column"}),
    "o_proj": (24, 83, {"partition_type": "row"}),
    # Query, key and value one after another, of equal sizes, of others, and by heads.
    "equal_qkv": (36, 24, {"partition_type": "column", "shape": [3, -1], "partition_dim": 0}),
    "grouped_qkv": (40, 24, {"partition_type": "column", "shape": [[20, 11, 9], -1], "partition_dim": 0}),
    "by_heads": (60, 24, {"partition_type": "column", "shape": [3, [12, 4, 4], 24], "partition_dim": 1}),
    # Rows of a block stay together.
    "blocks": (60, 24, {"partition_type": "column", "shape": [[7, 5], 5, 24], "partition_dim": 0}),
    "row_of_two": (24, 32, {"partition_type": "row", "shape": [-1, [20, 12]], "partition_dim": 1}),
    "plain": (8, 24, None),
}
# One value in all of it, as biases are made.
CONSTANT = "grouped_qkv.bias"


def patterns() -> dict[str, Any]:
    specs = [{"patterns": [rf".*{name}\.weight$"], **how} for name, (_, _, how) in LAYERS.items() if how is not None]
    return {"use_default_specs": False, "layer_specs": specs}


def model_of(dtype: str) -> Any:
    """Numbers that say where they are from; exact in bf16, where few are: those repeat."""
    import torch

    model = torch.nn.Module()
    model.block = torch.nn.Module()
    for name, (outputs, inputs, _) in LAYERS.items():
        model.block.add_module(name, torch.nn.Linear(inputs, outputs))
    model.block.norm = torch.nn.LayerNorm(24)
    most = 256 if dtype == "bfloat16" else 2**24
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(CONSTANT):
                parameter.fill_(0.25)
            elif not name.startswith("block.norm"):
                parameter.copy_((torch.arange(parameter.numel()) % most).float().view(parameter.shape))
    return model.to(getattr(torch, dtype))


def cut_by(tp: int, dtype: str) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """The whole parameters; by rank its slices, and what it says of them."""
    import deepspeed
    import torch

    from elastic.engines.deepspeed.layers.cuts import noting_cuts

    whole = {name: parameter.detach().clone() for name, parameter in model_of(dtype).named_parameters()}
    slices, said = [], []
    for rank in range(tp):
        deepspeed_ranks.join_fake(rank, tp)
        model = model_of(dtype)
        with noting_cuts(tp) as cuts:
            engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
                config={
                    "train_micro_batch_size_per_gpu": 1,
                    "zero_allow_untested_optimizer": True,
                    **({"bf16": {"enabled": True}} if dtype == "bfloat16" else {}),
                    "zero_optimization": {"stage": 0},
                    "tensor_parallel": {"autotp_size": tp, "partition_config": patterns()},
                },
                dist_init_required=False,
            )
        slices.append({name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()})
        said.append(dict(cuts))
        deepspeed_ranks._leave(engine)
    return whole, slices, said


def check_cuts(tp: int, dtype: str) -> None:
    """All ranks say the same, and what they say puts the slices together."""
    import torch

    whole, slices, said = cut_by(tp, dtype)
    assert all(found == said[0] for found in said)
    expected = {f"block.{name}.weight" for name, (_, _, how) in LAYERS.items() if how is not None}
    columns = [name for name, (_, _, how) in LAYERS.items() if (how or {}).get("partition_type") == "column"]
    expected |= {f"block.{name}.bias" for name in columns}
    assert set(said[0]) == expected, said[0]
    for name, value in whole.items():
        cut = said[0].get(name)
        if cut is None:
            assert all(torch.equal(own[name], value) for own in slices), name
            continue
        assert not isinstance(cut, str), (name, cut)
        made = torch.full_like(value, -1)
        for lane, own in enumerate(slices):
            indices = [index for start, stop in cut.ranges[lane] for index in range(start, stop)]
            made.index_copy_(cut.dim, torch.tensor(indices, dtype=torch.long), own[name])
        assert torch.equal(made, value), name
    sizes = {own["block.q_proj.weight"].shape[0] for own in slices}
    assert len(sizes) > 1, "97 rows are no even shares"


@contextmanager
def misdescribed(change: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """DeepSpeed says something else of fused weights than it does."""
    from deepspeed.module_inject.layers import SubParamLinearLayer, TensorParallel_Layer

    original = TensorParallel_Layer._set_param_uc_meta

    def say(layer: Any, parameter: Any, **meta: Any) -> None:
        if isinstance(layer, SubParamLinearLayer):
            change(meta)
        original(layer, parameter, **meta)

    TensorParallel_Layer._set_param_uc_meta = say
    try:
        yield
    finally:
        TensorParallel_Layer._set_param_uc_meta = original


def in_other_order(meta: dict[str, Any]) -> None:
    meta["sub_param_shard_widths"] = meta["sub_param_shard_widths"][::-1]
    meta["sub_param_sizes"] = meta["sub_param_sizes"][::-1]


def as_one(meta: dict[str, Any]) -> None:
    """One after another, as a matrix that holds one projection."""
    widths = meta.pop("sub_param_shard_widths")
    meta["sub_param_shard_widths"] = [[sum(own) for own in zip(*widths, strict=True)]]


def check_misdescribed(change: Callable[[dict[str, Any]], None]) -> None:
    """The parameters of which it is wrong, and no others, are not said to be put together."""
    with misdescribed(change):
        _, _, said = cut_by(2, "float32")
    for found in said:
        wrong = {name: cut for name, cut in found.items() if isinstance(cut, str)}
        # Unequal ones: others are as they were said to be, in any order of equal ones.
        assert {"block.grouped_qkv.weight", "block.grouped_qkv.bias"} <= set(wrong), found
        assert all("not the part that it is said to be" in why for why in wrong.values()), wrong
        assert not isinstance(found["block.q_proj.weight"], str)


def check_scaled() -> None:
    """A rank has a share of a bias that all add up: its optimizer would step it as far as the whole one."""
    import torch
    from deepspeed.module_inject.layers import LinearAllreduce

    original = LinearAllreduce._tp_partition

    def scaled(layer: Any, parameters: Any) -> None:
        original(layer, parameters)
        with torch.no_grad():
            parameters[1].data = parameters[1].data / 2

    LinearAllreduce._tp_partition, refused = scaled, ""
    try:
        cut_by(2, "float32")
    except UsageError as error:
        refused = str(error)
    finally:
        LinearAllreduce._tp_partition = original
    assert "AutoTP has changed the values of 'block.o_proj.bias'" in refused, refused


def main() -> None:
    deepspeed_ranks.begin()
    verdicts = {
        f"{dtype}-tp{tp}": deepspeed_ranks.verdict_of(check_cuts, tp, dtype) for dtype in DTYPES for tp in SIZES
    }
    verdicts["in another order"] = deepspeed_ranks.verdict_of(check_misdescribed, in_other_order)
    verdicts["as one"] = deepspeed_ranks.verdict_of(check_misdescribed, as_one)
    verdicts["scaled"] = deepspeed_ranks.verdict_of(check_scaled)
    Path(sys.argv[1]).write_text(json.dumps(verdicts))


if __name__ == "__main__":
    main()
