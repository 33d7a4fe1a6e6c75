"""SST-2 and DistilBERT from a hub, in a process of its own that is ended when it takes too long.

As a program: `python -m lab.hub OUTPUT COUNT LENGTH [MODEL_FOLDER]` writes {"texts", "labels"}, and with a folder the
pretrained model there and the tokenizer's "ids".
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from lab.sentences import Sentences

DATASET = ("nyu-mll/glue", "sst2")
MODEL = "distilbert-base-uncased"


class NotReached(Exception):
    """Why nothing came from the hub, in a few words."""


def fetch(output: Path, count: int, wait_s: float, model: Path | None, length: int) -> dict[str, Any]:
    """The first `count` sentences of SST-2 as {"texts", "labels"}. With `model` also "ids", [count][length], and the
    model's files in that folder. Raises NotReached, after `wait_s` seconds at the latest."""
    needed = ["datasets"] if model is None else ["datasets", "transformers"]
    for package in needed:
        if importlib.util.find_spec(package) is None:
            raise NotReached(f"the package {package} is not installed (pip install {' '.join(needed)})")
    command = [sys.executable, "-m", "lab.hub", str(output), str(count), str(length)]
    try:
        done = subprocess.run(
            command if model is None else [*command, str(model)],
            cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=wait_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise NotReached(f"the hub has not given {DATASET[1]} within {wait_s:g} s") from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        raise NotReached(f"the hub could not be read: {said[-1]}")
    found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return found


def sentences_of(found: dict[str, Any]) -> Sentences:
    texts = found["texts"]
    return Sentences(f"the first {len(texts)} sentences of SST-2, from the hub", texts, found["labels"])


def _main(output: str, count: str, length: str, model: str | None = None) -> None:
    import datasets

    rows = datasets.load_dataset(*DATASET, split=f"train[:{int(count)}]")
    found = {"texts": list(rows["sentence"]), "labels": list(rows["label"])}
    if model is not None:
        import transformers

        tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
        encoded = tokenizer(found["texts"], padding="max_length", truncation=True, max_length=int(length))
        found["ids"] = encoded["input_ids"]
        classifier = transformers.DistilBertForSequenceClassification.from_pretrained(MODEL, num_labels=2)
        classifier.save_pretrained(model)
    Path(output).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    _main(*sys.argv[1:])
