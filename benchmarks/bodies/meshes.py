"""The GPT of the benchmarks on meshes, and compiled: what each needs of the model, the configuration and the run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import elastic
from benchmarks import workload
from benchmarks.bodies import fsdp2_alone
from benchmarks.workload import Size, example

EXPERTS, _CHOSEN = 4, 2
_CUT = [
    {"patterns": [r".*\.mlp\.0\.weight$"], "partition_type": "column"},
    {"patterns": [r".*\.mlp\.2\.weight$"], "partition_type": "row"},
]


def arguments(form: str, size: Size, config: dict[str, Any]) -> dict[str, Any]:
    """Of `elastic.initialize`. `config`: DeepSpeed's without a mesh."""
    model, optimizer, data = workload.build(size)
    given: dict[str, Any] = {}
    match form:
        case "compiled":
            model.compile()
        case "FSDP2" | "FSDP2 tp 2" | "FSDP2 compiled":
            if form.endswith("compiled"):
                # As torchtitan does.
                for block in model.blocks:
                    block.compile()
            config = {"global_batch": size.batch, "micro_batch": size.micro}
            given = {"tp_plan": fsdp2_alone.plan()} if form.endswith("tp 2") else {}
        case "AutoTP 2":
            cut = {"use_default_specs": False, "layer_specs": _CUT}
            config["tensor_parallel"] = {"partition_config": cut}
        case "sp 2":
            model.forward, blocks = _Shared(model), model.blocks
            for block in blocks:
                block.forward = _SharedBlock(block)
        case "ep 2":
            for block in model.blocks:
                block.mlp = _Mixture(size.width)
            model.config = SimpleNamespace(num_local_experts=EXPERTS, num_experts_per_tok=_CHOSEN)
            config["expert_parallel"] = {
                "preset_model": "mixtral", "moe_layer_pattern": r"blocks\.\d+\.mlp", "use_grouped_mm": False,
            }  # fmt: skip
        case "pp 2":
            model, data = _stages(size), _Pairs(data)
        case "FSDP2 pp 2":
            model, data = nn.Sequential(*_layers(size)), _Pairs(data)
            config = {"global_batch": size.batch, "micro_batch": size.micro}
            given = {"pipeline": elastic.Pipeline(_loss)}
        case _:
            raise ValueError(f"there is no mesh {form!r} here")
    if form in ("ep 2", "pp 2", "FSDP2 pp 2"):
        optimizer = type(optimizer)(model.parameters(), **fsdp2_alone.options(optimizer))
    return {"model": model, "optimizer": optimizer, "training_data": data, "config": config, **given}


class _Shared:
    """The forward pass of a model over this rank's part of each window."""

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model

    def __call__(self, windows: torch.Tensor) -> torch.Tensor:
        split, model = elastic.sequence.split, self._model
        inputs, targets = split(windows[:, :-1]), split(windows[:, 1:])
        places = split(torch.arange(windows.shape[1] - 1, device=windows.device), dim=0)
        logits = model.head(model.norm(model.blocks(model.tokens(inputs) + model.places(places))))
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        loss: torch.Tensor = elastic.sequence.mean(total, targets.numel())
        return loss


class _SharedBlock:
    """That of a block: attention sees whole sequences and a share of the heads. Without dropout."""

    def __init__(self, block: nn.Module) -> None:
        self._block: Any = block

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        block = self._block
        q, k, v = block.qkv(block.norm_1(x)).unflatten(2, (3, block.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = elastic.sequence.attention(F.scaled_dot_product_attention, q, k, v, is_causal=True)
        x = x + block.out(mixed.transpose(1, 2).flatten(2))
        found: torch.Tensor = x + block.mlp(block.norm_2(x))
        return found


class _Experts(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(0.02 * torch.randn(EXPERTS, 2 * width, width))
        self.down_proj = nn.Parameter(0.02 * torch.randn(EXPERTS, width, width))
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        gate, up = F.linear(x, self.gate_up_proj[expert]).chunk(2, dim=-1)
        return F.linear(self.act_fn(gate) * up, self.down_proj[expert])


class _Mixture(nn.Module):
    """In the place of a block's MLP, with experts that together have half as much again as that; in the form that
    AutoEP knows, which replaces it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(width, EXPERTS, bias=False), _Experts(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        scores, chosen = self.gate(tokens).softmax(-1).topk(_CHOSEN)
        answer = torch.zeros_like(tokens)
        for expert in range(EXPERTS):
            token, place = (chosen == expert).nonzero(as_tuple=True)
            part = self.experts(tokens[token], expert) * scores[token, place, None]
            answer = answer.index_add(0, token, part)
        return answer.view_as(x)


class _Embedding(nn.Module):
    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(context, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.tokens(inputs) + self.places(torch.arange(inputs.shape[1], device=inputs.device))
        return found


class _Pairs:
    """Windows as (inputs, labels)."""

    def __init__(self, windows: Any) -> None:
        self._windows = windows

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self._windows[index]
        return window[:-1], window[1:]


def _stages(size: Size) -> Any:
    """The GPT as layers of a pipeline, its head with a table of its own."""
    from deepspeed.pipe import LayerSpec, PipelineModule

    blocks = [LayerSpec(example().Block, size.width, size.heads, 0.0) for _ in range(size.layers)]
    last = [LayerSpec(nn.LayerNorm, size.width), LayerSpec(nn.Linear, size.width, 256, bias=False)]
    layers = [LayerSpec(_Embedding, size.width, size.context), *blocks, *last]
    return PipelineModule(layers=layers, loss_fn=_loss, partition_method="parameters")


def _layers(size: Size) -> list[nn.Module]:
    """The same, built, for torch's pipelining."""
    blocks = [example().Block(size.width, size.heads, 0.0) for _ in range(size.layers)]
    return [
        _Embedding(size.width, size.context),
        *blocks,
        nn.LayerNorm(size.width),
        nn.Linear(size.width, 256, bias=False),
    ]


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
