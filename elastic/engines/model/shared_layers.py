"""What names and kinds of a model's modules say of cutting them, whichever engine cuts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from elastic.core.errors import MeshRefused, UsageError
from elastic.core.mesh import described
from elastic.engines.model.plain_names import named_modules

if TYPE_CHECKING:
    from collections.abc import Mapping

    # What is refused is known to the command line, which loads no torch.
    import torch

# Several projections in one matrix, one after another: a rank's rows would be all of one and none of another.
_FUSED = re.compile(r"(w|c_)?(qkv|attn)(_proj)?|gate_up(_proj)?|in_proj|w13", re.IGNORECASE)


def is_fused(name: str) -> bool:
    """Does the module of this name hold several projections, one after another?"""
    return _FUSED.fullmatch(name.rpartition(".")[2]) is not None


def heads_of(name: str, modules: Mapping[str, Any]) -> int | None:
    """How many heads the rows of a matrix are by the module around it, where that has torchtitan's names: `head_dim`
    rows each of `wq`, `wk` and `wv`; of one that holds all three `r_dim` times as many, a group of heads with its
    queries, key and value, so that ranks can have some of the groups. None where nothing says it."""
    above, _, last = name.rpartition(".")
    rows, holder = getattr(modules[name], "weight", None), modules.get(above)
    together = getattr(holder, "r_dim", None) if is_fused(name) else {"wq": 1, "wk": 1, "wv": 1}.get(last)
    size = getattr(holder, "head_dim", None)
    if rows is None or not isinstance(together, int) or not isinstance(size, int):
        return None
    return int(rows.shape[0]) // (together * size)


def refuse_transposed(model: torch.nn.Module, tp: int) -> None:
    """Raises UsageError for a model of transformers whose matrices are `Conv1D`s (GPT-2's, and those made like it).

    They are [input, output] and not [output, input]: who takes them for linear layers cuts the other dimension, which a
    square one does not tell. The projections of attention are in one of them.
    """
    found = next((name for name, module in named_modules(model) if is_conv1d(module)), None)
    if found is not None:
        raise UsageError(
            f"{described(1, tp)}: {found!r} of {type(model).__name__} is a Conv1D of transformers, which AutoTP would "
            "take for a linear layer; share its layers with engine: fsdp2, or partition its weights without mesh.tp "
            "(zero_optimization.stage: 3)"
        )


def refuse_adapters(model: torch.nn.Module, tp: int) -> None:
    """Raises UsageError for a model with adapters of PEFT, whose own small matrices AutoTP would cut by themselves."""
    found = next((name for name, module in named_modules(model) if hasattr(module, "base_layer")), None)
    if found is not None:
        raise UsageError(
            f"{described(1, tp)}: {found!r} of {type(model).__name__} has an adapter of PEFT, which AutoTP does not "
            "know; share its layers with engine: fsdp2, which cuts LoRA with them, or partition its weights without "
            "mesh.tp (zero_optimization.stage: 3)"
        )


def is_conv1d(module: Any) -> bool:
    """Is it transformers' layer with a matrix [input, output]?"""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def refuse_split_heads(model: torch.nn.Module, name: str, tp: int) -> None:
    """Raises UsageError where ranks would have parts of heads: `name` is a projection that is cut evenly by rows."""
    config = _of_text(getattr(model, "config", None))
    heads = getattr(config, "num_attention_heads", None)
    groups = getattr(config, "num_key_value_heads", None) or heads
    count = {"q_proj": heads, "k_proj": groups, "v_proj": groups}.get(name.rpartition(".")[2])
    if count is None:
        count = heads_of(name, dict(named_modules(model)))
    if isinstance(count, int) and count % tp:
        raise MeshRefused(
            f"{described(1, tp)}: {name!r} has {count} heads, which {tp} workers cannot share evenly; use a tp that "
            "divides the numbers of heads (num_attention_heads, num_key_value_heads; n_heads, n_kv_heads)"
        )


def _of_text(config: Any) -> Any:
    """Models of images and text say it of the text in a configuration inside theirs."""
    return getattr(config, "text_config", None) or config


def explain(error: Exception, tp: int) -> None:
    """A note for an exception out of the forward pass of a model that has been cut."""
    note = (
        f"{described(1, tp)}: the model's linear layers are cut, so that a worker has 1/{tp} of the heads and columns. "
        "Its code must take numbers of heads from the shape of what projections give, and must not change the output "
        "of a layer in place. A model that does otherwise (Bloom, Falcon and MPT of transformers) is trained without "
        "mesh.tp, by zero_optimization.stage: 3 or engine: fsdp2"
    )
    # As `add_note` of Python 3.11 has it.
    error.__notes__ = [*getattr(error, "__notes__", ()), note]  # type: ignore[attr-defined]
