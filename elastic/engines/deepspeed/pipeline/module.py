"""A PipelineModule of the user's: its random streams, and what of it can be carried.

Each layer is built from a random stream of its own, and each layer's forward pass draws from
one, so that neither initial weights nor dropout depend on the number of stages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from elastic.core.errors import UsageError
from elastic.engines.deepspeed.refused import refuse_zero_init

_HOMES = ("deepspeed.pipe", "deepspeed.runtime.pipe")
_BITS32 = (1 << 32) - 1


def is_pipeline(model: Any) -> bool:
    """By the class's name, so that DeepSpeed need not be imported."""
    return any(each.__name__ == "PipelineModule" and each.__module__.startswith(_HOMES) for each in type(model).__mro__)


class LayerSeeds:
    """In the place of `seed_fn`, which DeepSpeed calls before it builds a layer, and before a layer's forward pass.

    `before_layer` is called with a layer's number during a pass; None: the pass has no stream of its own."""

    __name__ = "elastic"

    def __init__(self, module: Any, seeded: bool, seed: Callable[[int], Any] | None) -> None:
        """`seeded`, `seed`: the user's `seed_layers` and `seed_fn`, by which layers are then built."""
        from deepspeed.runtime.utils import set_random_seed

        self._set: Callable[[int], Any] = (seed if seeded and seed is not None else None) or set_random_seed
        self._base = 0 if seeded else _seed_of_first_rank()
        self.before_layer: Callable[[int], None] | None = None
        self.built = False
        self._module: Any = module

    def __call__(self, value: Any) -> None:
        if not self.built:
            # Parts balanced by parameters are numpy's integers, which Python's generator refuses.
            self._set((self._base + int(value)) & _BITS32 if self._base else int(value))
        elif self.before_layer is not None:
            self.before_layer(int(self._module.curr_layer))


def _seed_of_first_rank() -> int:
    """What the first rank's generator was last seeded with: scripts may seed by rank. Collective."""
    from deepspeed import comm
    from deepspeed.accelerator import get_accelerator

    seed = torch.tensor([torch.initial_seed() >> 1], dtype=torch.int64).to(get_accelerator().device_name())
    comm.broadcast(seed, src=0)
    # Never zero, which stands for none.
    return int(seed.item()) * 2 + 1


def require_carriable(model: Any) -> None:
    """Raises UsageError for a PipelineModule that would train otherwise in other stages, or cannot be saved."""
    if any(each.__name__ == "DualPipeVModule" for each in type(model).__mro__):
        raise UsageError("DualPipeVModule is not supported: a rank has two parts of the layers; use PipelineModule")
    if not isinstance(model.seed_fn, LayerSeeds):
        raise UsageError("the PipelineModule was built outside of this generation; build it in the training function")
    if model.loss_fn is None:
        raise UsageError("PipelineModule needs loss_fn=, the mean loss of a micro-batch from (outputs, labels)")
    refuse_zero_init(model, "PipelineModule")
    if model.num_stages == 1:
        return
    everywhere = [name for name, _ in (*model.named_parameters(), *model.named_buffers()) if not _of_a_layer(name)]
    if everywhere:
        raise UsageError(
            f"{everywhere[0]} is not of a layer, so that every stage would train or keep a copy of it: put it into one "
            "of the PipelineModule's layers"
        )
    for key, module in model.tied_modules.items():
        tied = set(_tied_attributes(model, key))
        own = {name for name, _ in module.named_parameters()}
        if own - tied or any(True for _ in module.named_buffers()):
            rest = sorted((own - tied) | {name for name, _ in module.named_buffers()})
            raise UsageError(
                f"the tied module {key!r} has {', '.join(rest)} beside what tied_weight_attr names: DeepSpeed would "
                "train a copy of it in each stage; name all its parameters in TiedLayerSpec(tied_weight_attr=[...]), "
                "and give it no buffers"
            )


def tied_names(model: Any) -> tuple[str, ...]:
    """Names of the parameters that several stages have copies of; the same on all ranks."""
    if not is_pipeline(model) or model.num_stages == 1:
        return ()
    stages: dict[str, set[int]] = {}
    for number, spec in enumerate(model._layer_specs):
        if is_tied(spec):
            stages.setdefault(spec.key, set()).add(model.stage_owner(number))
    return tuple(
        f"tied_modules.{key}.{name}"
        for key in sorted(stages)
        if len(stages[key]) > 1
        for name in _tied_attributes(model, key)
    )


def saved_elsewhere(model: nn.Module) -> frozenset[str]:
    """Names of this stage's tied parameters of which the first of their stages saves its copy."""
    return frozenset(name for name, p in model.named_parameters() if getattr(p, "ds_pipe_replicated", False))


def layers_by_name(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """In which layers, by number, each parameter of a PipelineModule is; empty for another model."""
    if not is_pipeline(model):
        return {}
    tied: dict[str, list[int]] = {}
    for number, spec in enumerate(cast(Any, model)._layer_specs):
        if is_tied(spec):
            tied.setdefault(spec.key, []).append(number)
    return {
        name: tuple(tied[parts[1]]) if parts[0] == "tied_modules" else (int(parts[0]),)
        for name, _ in model.named_parameters()
        if (parts := name.split(".")) and _of_a_layer(name)
    }


def _of_a_layer(name: str) -> bool:
    first = name.split(".", 1)[0]
    return first.isdecimal() or first == "tied_modules"


def is_tied(spec: Any) -> bool:
    return any(each.__name__ == "TiedLayerSpec" for each in type(spec).__mro__)


def _tied_attributes(model: Any, key: str) -> list[str]:
    found = next(spec.tied_weight_attr for spec in model._layer_specs if is_tied(spec) and spec.key == key)
    return [found] if isinstance(found, str) else list(found)
