"""A byte-level GPT on the source of Python's own standard library, with DeepSpeed alone.

Compare with gpt.py, which is this script made elastic.
"""

from __future__ import annotations

import functools
import math
import sysconfig
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

DS_CONFIG = Path(__file__).with_name("ds_config.json")


@functools.cache
def stdlib_bytes() -> bytes:
    """The modules of the standard library one after the other: 5 MB of text that every machine with Python has."""
    return b"".join(file.read_bytes() for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))


class Windows(Dataset[Tensor]):
    """Windows of `context` + 1 bytes that overlap by the one byte that is target in one and input in the next."""

    def __init__(self, text: bytes, context: int) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        begin = index * self.context
        return self.text[begin : begin + self.context + 1].long()


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        drop = self.dropout if self.training else 0.0
        q, k, v = self.qkv(self.norm_1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=drop, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), drop)
        return x + F.dropout(self.mlp(self.norm_2(x)), drop)


class GPT(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        # The same table turns bytes into vectors and vectors into bytes.
        self.head.weight = self.tokens.weight

    def forward(self, windows: Tensor) -> Tensor:
        """`windows` is [batch, context + 1] of byte values; returns the mean cross-entropy of each next byte."""
        inputs, targets = windows[:, :-1], windows[:, 1:]
        x = self.tokens(inputs) + self.places(torch.arange(inputs.shape[1], device=inputs.device))
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def warmup_then_cosine(step: int, warmup_steps: int, decay_steps: int) -> float:
    """The factor of the learning rate before optimizer step `step` (from 0); a tenth of it is left at the end."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, decay_steps - warmup_steps))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def train(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = GPT(config["width"], config["layers"], config["heads"], config["context"], config["dropout"])
    data = Windows(stdlib_bytes(), config["context"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"], betas=(0.9, 0.95), weight_decay=0.1)
    shape = functools.partial(
        warmup_then_cosine, warmup_steps=config["warmup_steps"], decay_steps=config["decay_steps"]
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, shape)
    engine, _, loader, _ = deepspeed.initialize(
        model=model, optimizer=optimizer, training_data=data, lr_scheduler=scheduler, config=str(DS_CONFIG)
    )
    for windows in loader:
        loss = engine(windows.to(engine.device))
        engine.backward(loss)
        engine.step()


CONFIG = {
    "width": 128,
    "layers": 4,
    "heads": 4,
    "context": 64,
    "dropout": 0.1,
    "lr": 2e-3,
    "warmup_steps": 20,
    "decay_steps": 120,
}

if __name__ == "__main__":
    train(CONFIG)
