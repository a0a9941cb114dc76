"""Film reviews of IMDb from a local folder, as they are distributed (https://ai.stanford.edu/~amaas/data/sentiment/).

`aclImdb/train/pos/*.txt` and `neg`, and the same below `test`: a review each, as text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.datasets.trouble import existing, refused

PAD, UNKNOWN = 0, 1
KINDS = ("neg", "pos")
WORD = re.compile(r"[a-z0-9']+")
REMEDY = "Unpack https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz and name its folder aclImdb."

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Reviews:
    """Reviews as numbers of words.

    Args:
        words: (reviews, length), int64: the last words of each, PAD before them.
        labels: (reviews), int64: 1 if the review praises.
    """

    words: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def shuffled(self, rows: int, seed: int) -> Iterator[Batch]:
        """All reviews once in full batches, in an order that depends on the seed."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        for chosen in order.split(rows)[: len(self) // rows]:
            yield self.words[chosen], self.labels[chosen]

    def in_order(self, rows: int) -> Iterator[Batch]:
        """All reviews once; the last batch may be short."""
        yield from zip(self.words.split(rows), self.labels.split(rows), strict=True)


def read(folder: Path, *, vocabulary: int, length: int) -> tuple[Reviews, Reviews]:
    """Reviews to train on and held out; the words that occur most in the former are known.

    Args:
        folder: aclImdb.
        vocabulary: numbers of words, PAD and UNKNOWN among them.
        length: words of a review; of a longer one its end is taken.

    Raises:
        JobError: folder or file is missing or no text.
    """
    existing(folder, "the folder aclImdb", REMEDY)
    train, test = _texts(folder / "train"), _texts(folder / "test")
    counts = Counter(word for text, _ in train for word in words_of(text))
    known = {word: n for n, (word, _) in enumerate(counts.most_common(vocabulary - 2), 2)}
    return _numbered(train, known, length), _numbered(test, known, length)


def words_of(text: str) -> list[str]:
    """In lower case, without marks and the line breaks that the texts write as `<br />`."""
    return WORD.findall(text.lower().replace("<br />", " "))


def _texts(folder: Path) -> list[tuple[str, int]]:
    found = []
    for label, kind in enumerate(KINDS):
        paths = sorted(existing(folder / kind, "a folder of reviews", REMEDY).glob("*.txt"))
        if not paths:
            raise refused(folder / kind, "no file called *.txt", "a review in each", REMEDY)
        found += [(_text(path), label) for path in paths]
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise refused(
            path, f"{type(error).__name__}: {error}", "a review as UTF-8", "Unpack the data again."
        ) from error


def _numbered(texts: Sequence[tuple[str, int]], known: dict[str, int], length: int) -> Reviews:
    rows = torch.full((len(texts), length), PAD)
    for row, (text, _) in zip(rows, texts, strict=True):
        numbers = [known.get(word, UNKNOWN) for word in words_of(text)[-length:]]
        if numbers:
            row[-len(numbers) :] = torch.tensor(numbers)
    return Reviews(rows, torch.tensor([label for _, label in texts]))
