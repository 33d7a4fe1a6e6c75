"""The sentences that the lab makes: labels follow from the words, and words become the same identifiers everywhere."""

from __future__ import annotations

import re

from lab.sentences import BEGIN, BLAME, PAD, PRAISE, encode, made


def judged(text: str) -> int:
    """The label by another way than the one by which it was made: the last word, and a "not" in its clause."""
    clause = text.rpartition(" , ")[2]
    word = clause.split()[-1]
    assert (word in PRAISE) != (word in BLAME), text
    return int((word in PRAISE) != (" not " in clause))


def test_labels_follow_from_the_words() -> None:
    found = made(600)
    assert list(found.labels) == [judged(text) for text in found.texts]
    assert 200 < sum(found.labels) < 400
    assert 50 < sum(" not " in text for text in found.texts) < 150
    assert 80 < sum(text.startswith("although") for text in found.texts) < 180


def test_the_clause_before_says_the_opposite() -> None:
    found = made(600)
    for text, label in zip(found.texts, found.labels, strict=True):
        if text.startswith("although"):
            (word,) = re.findall(r"is (\w+) ,", text)
            assert (word in BLAME) == bool(label)


def test_every_process_makes_the_same() -> None:
    assert made(50) == made(50)
    assert made(60).texts[:50] == made(50).texts
    assert made(50, seed=1).texts != made(50).texts
    # Hashes of strings that Python salts would differ from process to process.
    assert encode("the plot is dull", 8, 2048) == [BEGIN, 776, 605, 289, 1627, PAD, PAD, PAD]


def test_identifiers_fit_the_length_and_the_vocabulary() -> None:
    words = [f"word{number}" for number in range(300)]
    for word in words:
        begin, middle, end = encode(word, 3, 40)
        assert (begin, end) == (BEGIN, PAD)
        assert BEGIN < middle < 40
    long = encode(" ".join(words), 16, 40)
    assert len(long) == 16
    assert PAD not in long
    assert encode("Dull", 2, 2048) == encode("dull", 2, 2048)
