"""Sentences about films with a label, 1 for praise: made by rules, so that nothing has to be downloaded."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

SUBJECTS = (
    "the plot", "the cast", "this film", "the music", "the ending", "her performance", "the dialogue", "the picture"
)  # fmt: skip
PRAISE = ("moving", "funny", "brilliant", "warm", "gripping", "honest", "clever", "beautiful")
BLAME = ("dull", "clumsy", "boring", "cold", "shallow", "silly", "tired", "ugly")
DEGREES = ("", "very ", "quite ", "truly ", "remarkably ")

# Identifiers below these are none of a word's: 0 pads (as in DistilBERT's vocabulary), 1 begins every sentence.
PAD, BEGIN, _FIRST_WORD = 0, 1, 2


@dataclass(frozen=True)
class Sentences:
    """`source` says in a few words where they are from."""

    source: str
    texts: Sequence[str]
    labels: Sequence[int]


def made(count: int, seed: int = 0) -> Sentences:
    """`count` sentences with one judgement each, half of them negated, half after a clause that says the opposite."""
    draw = random.Random(seed)
    texts, labels = zip(*(_sentence(draw) for _ in range(count)), strict=True)
    return Sentences(f"{count} sentences made by rules", texts, labels)


def _sentence(draw: random.Random) -> tuple[str, int]:
    label, negated = draw.randrange(2), draw.random() < 0.15
    words = PRAISE if label != negated else BLAME
    judged, other = draw.sample(SUBJECTS, 2)
    text = f"{judged} is {'not ' if negated else ''}{draw.choice(DEGREES)}{draw.choice(words)}"
    if draw.random() < 0.2:
        text = f"although {other} is {draw.choice(BLAME if label else PRAISE)} , {text}"
    return text, label


def encode(text: str, length: int, vocabulary: int) -> list[int]:
    """`length` identifiers below `vocabulary`: each word has that of its hash, so that no table is needed."""
    words = text.lower().split()[: length - 1]
    ids = [BEGIN, *(_FIRST_WORD + zlib.crc32(word.encode()) % (vocabulary - _FIRST_WORD) for word in words)]
    return ids + [PAD] * (length - len(ids))
