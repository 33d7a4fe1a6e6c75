"""What both runs train on: the file with the samples, chosen by what can be reached, and the changes of the job."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lab import hub
from lab.classifier import Shape, build
from lab.sentences import encode, made


@dataclass(frozen=True)
class Prepared:
    """`config` is that of the training function, `tensors` are the elements of the model's parameters."""

    config: Mapping[str, Any]
    tensors: tuple[int, ...]
    count: int


def prepare(
    folder: Path, config: Mapping[str, Any], batch: int, full: bool, wait_s: float, say: Callable[[str], None]
) -> Prepared:
    """Writes `folder`/data.json, in whole batches, and says what was chosen, and why. `full`: with
    DistilBERT's weights and tokens, where a hub has them."""
    changed = dict(config)
    pretrained = folder / "model" if full else None
    length, count = int(changed["length"]), int(changed["sentences"])
    ids = None
    try:
        found = hub.fetch(folder / "hub.json", count, wait_s, pretrained, length)
        sentences, ids = hub.sentences_of(found), found.get("ids")
        if pretrained is not None:
            changed["pretrained"] = str(pretrained)
    except hub.NotReached as why:
        sentences = made(count)
        say(f"no SST-2: {why}")
    if ids is None:
        ids = [encode(text, length, changed["vocabulary"]) for text in sentences.texts]
    data, whole = folder / "data.json", len(ids) // batch * batch
    data.write_text(json.dumps({"ids": ids[:whole], "labels": list(sentences.labels[:whole])}), encoding="utf-8")
    with torch.device("meta"):
        tensors = tuple(p.numel() for p in build(Shape.of(changed)).parameters())
    say(f"data: {sentences.source}, for example {sentences.texts[0]!r} with label {sentences.labels[0]}")
    say(f"model: {_model(changed, sum(tensors))}")
    return Prepared({**changed, "data": str(data)}, tensors, whole)


def _model(config: Mapping[str, Any], parameters: int) -> str:
    whose = "transformers' DistilBERT"
    if importlib.util.find_spec("transformers") is None:
        whose = "a classifier of DistilBERT's shape in torch (pip install '.[hf]' for transformers' own)"
    weights = "pretrained weights" if "pretrained" in config else "weights drawn at random"
    return f"{whose}, {parameters:,} parameters, {config['layers']} layers of width {config['width']}, {weights}"
