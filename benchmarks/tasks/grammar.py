"""Translation between two small languages made by a grammar, scored by BLEU.

The source is subject, verb, object, with adjectives behind their nouns and perhaps an adverb at the end or a negation
before the verb. The target puts the adverb first, the verb last and adjectives before their nouns, has an article that
agrees with its noun's gender, endings on nouns and verbs for their number, and a negation behind the object: so words
have to be moved, chosen and bent. Every source sentence has one translation, so BLEU can reach 100.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import roundelay
from roundelay.job import OptimizerFactory, SchedulerFactory
from roundelay.optional_packages import optional

NOUNS = {
    "cat": ("kato", "m"), "dog": ("hundo", "m"), "king": ("rego", "m"), "boy": ("knabo", "m"), "bear": ("urso", "m"),
    "queen": ("regi", "f"), "bird": ("birdi", "f"), "girl": ("knabi", "f"), "cow": ("bovi", "f"), "bee": ("abeli", "f"),
    "house": ("domu", "n"), "tree": ("arbu", "n"), "book": ("libru", "n"), "ship": ("sipu", "n"),
    "child": ("infanu", "n"),
}  # fmt: skip
VERBS = {"sees": "vid", "finds": "trov", "hears": "aud", "likes": "sat", "paints": "pentr", "carries": "port",
    "loses": "perd", "washes": "lav"}  # fmt: skip
ADJECTIVES = {"old": "malnov", "new": "nov", "red": "rug", "small": "et", "happy": "felic", "grey": "griz"}
ADVERBS = {"often": "ofte", "today": "hodiau", "slowly": "malrapide", "never-again": "neniam-plu"}
ARTICLES = {("m", False): "der", ("f", False): "di", ("n", False): "das", ("m", True): "dern", ("f", True): "dir",
    ("n", True): "dasn"}  # fmt: skip

PAD, BEGIN, END = 0, 1, 2
SOURCE_LENGTH, TARGET_LENGTH = 11, 12  # words of the longest sentence; with BEGIN or END
ROWS, UPDATES = 32, 48  # of a batch; in an epoch
HELD_OUT = 200
WIDTH, HEADS = 32, 4

Sentence = tuple[list[str], list[str]]
Batch = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class _Phrase:
    source: list[str]
    target: list[str]
    plural: bool


def _phrase(generator: random.Random, object_: bool) -> _Phrase:
    """An article, a noun and up to two adjectives."""
    noun = generator.choice(list(NOUNS))
    root, gender = NOUNS[noun]
    plural = generator.random() < 0.4
    adjectives = generator.sample(list(ADJECTIVES), generator.choice((0, 0, 1, 1, 2)))
    source = ["the", noun + ("-s" if plural else ""), *adjectives]
    bent = [ADJECTIVES[word] + ("aj" if plural else "a") for word in adjectives]
    return _Phrase(source, [ARTICLES[gender, object_], *bent, root + ("j" if plural else "")], plural)


def sentence(generator: random.Random) -> Sentence:
    """A sentence and its translation."""
    subject, object_ = _phrase(generator, False), _phrase(generator, True)
    verb = generator.choice(list(VERBS))
    adverb = generator.choice([None, None, *ADVERBS])
    negated = generator.random() < 0.3
    source = [*subject.source, *(["not"] if negated else []), verb, *object_.source, *([adverb] if adverb else [])]
    bent = VERBS[verb] + ("antas" if subject.plural else "as")
    target = [*([ADVERBS[adverb]] if adverb else []), *subject.target, *object_.target, *(["ne"] if negated else [])]
    return source, [*target, bent]


@cache
def vocabularies() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The words of both languages, behind PAD, BEGIN and END."""
    source = {"the", "not", *VERBS, *ADJECTIVES, *ADVERBS, *NOUNS, *(f"{noun}-s" for noun in NOUNS)}
    nouns = [root for root, _ in NOUNS.values()]
    target = {"ne", *ADVERBS.values(), *ARTICLES.values(), *nouns, *(f"{root}j" for root in nouns)}
    target |= {f"{root}{end}" for root in ADJECTIVES.values() for end in ("a", "aj")}
    target |= {f"{root}{end}" for root in VERBS.values() for end in ("as", "antas")}
    marks = ("<pad>", "<begin>", "<end>")
    return (*marks, *sorted(source)), (*marks, *sorted(target))


def _numbers(words: Sequence[str], vocabulary: Sequence[str], length: int) -> list[int]:
    return [*(vocabulary.index(word) for word in words), *[PAD] * (length - len(words))]


def encode(sentences: Sequence[Sentence]) -> Batch:
    """`source` (rows, SOURCE_LENGTH); `written`, the target behind BEGIN, and `next`, it before END: TARGET_LENGTH."""
    ours, theirs = vocabularies()
    source = [_numbers(s, ours, SOURCE_LENGTH) for s, _ in sentences]
    written = [_numbers(["<begin>", *t], theirs, TARGET_LENGTH) for _, t in sentences]
    following = [_numbers([*t, "<end>"], theirs, TARGET_LENGTH) for _, t in sentences]
    return {"source": torch.tensor(source), "written": torch.tensor(written), "next": torch.tensor(following)}


def draw(count: int, seed: int) -> list[Sentence]:
    """Sentences: the same for the same seed."""
    generator = random.Random(seed)
    return [sentence(generator) for _ in range(count)]


def batches(seed: int, epoch: int) -> Iterator[Batch]:
    """UPDATES batches of new sentences."""
    made = encode(draw(ROWS * UPDATES, 1_000_003 * (seed + 1) + epoch))
    for start in range(0, ROWS * UPDATES, ROWS):
        yield {name: rows[start : start + ROWS] for name, rows in made.items()}


class Attention(nn.Module):
    """Attention from one sequence to another, with a way past it."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.norm = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key_value = nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, context: Tensor | None = None, hidden: Tensor | None = None) -> Tensor:
        """(rows, here, WIDTH) to the same, reading context (rows, there, WIDTH); hidden: (rows, 1, 1, there)."""
        normed = self.norm(x)
        key, value = self.key_value(normed if context is None else context).chunk(2, -1)

        def heads(part: Tensor) -> Tensor:
            return part.unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2)

        bias = None if hidden is None else torch.zeros(hidden.shape).masked_fill(hidden, -1e9)
        read = F.scaled_dot_product_attention(
            heads(self.query(normed)), heads(key), heads(value), attn_mask=bias, is_causal=self.causal
        )
        return x + self.out(read.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """An encoder's or a decoder's."""

    def __init__(self, decodes: bool) -> None:
        super().__init__()
        self.own = Attention(causal=decodes)
        self.other = Attention(causal=False) if decodes else None
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, hidden: Tensor, context: Tensor | None = None) -> Tensor:
        """`hidden` says which source words are none."""
        x = self.own(x, None, None if self.other is not None else hidden)
        if self.other is not None:
            x = self.other(x, context, hidden)
        return x + self.mlp(x)


class Translator(nn.Module):
    """Two layers of encoder, two of decoder."""

    def __init__(self) -> None:
        super().__init__()
        ours, theirs = vocabularies()
        self.read = nn.Embedding(len(ours), WIDTH)
        self.read_place = nn.Embedding(SOURCE_LENGTH, WIDTH)
        self.encoder = nn.ModuleList([Layer(False), Layer(False)])
        self.write = nn.Embedding(len(theirs), WIDTH)
        self.write_place = nn.Embedding(TARGET_LENGTH, WIDTH)
        self.decoder = nn.ModuleList([Layer(True), Layer(True)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(theirs))

    def forward(self, source: Tensor, written: Tensor) -> Tensor:
        """Logits of the word behind each written one: (rows, TARGET_LENGTH, words)."""
        hidden = (source == PAD)[:, None, None]
        x = self.read(source) + self.read_place.weight
        for layer in self.encoder:
            x = layer(x, hidden)
        y = self.write(written) + self.write_place.weight
        for layer in self.decoder:
            y = layer(y, hidden, x)
        logits: Tensor = self.head(self.norm(y))
        return logits


def loss(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Sum over the words that are there, and their count."""
    following = batch["next"]
    total = F.cross_entropy(logits.flatten(0, 1), following.flatten(), ignore_index=PAD, reduction="sum")
    return total, (following != PAD).sum()


@torch.no_grad()
def translate(model: nn.Module, sentences: Sequence[Sentence]) -> list[str]:
    """What the model writes, always the most probable word next."""
    source = encode(sentences)["source"]
    written = torch.full((len(sentences), TARGET_LENGTH), PAD)
    written[:, 0] = BEGIN
    for place in range(TARGET_LENGTH - 1):
        written[:, place + 1] = model(source, written)[:, place].argmax(-1)
    words = vocabularies()[1]
    return [_sentence(row, words) for row in written[:, 1:].tolist()]


def _sentence(numbers: list[int], words: Sequence[str]) -> str:
    until = numbers.index(END) if END in numbers else len(numbers)
    return " ".join(words[number] for number in numbers[:until] if number > END)


def bleu(written: Sequence[str], right: Sequence[str]) -> float:
    """Corpus BLEU of sacrebleu, 0 to 100; words are split at blanks, as both languages have no punctuation.

    Raises:
        UsageError: sacrebleu is not installed.
    """
    sacrebleu = optional("sacrebleu", "BLEU of the translations", "sacrebleu", ".")
    return float(sacrebleu.corpus_bleu(list(written), [list(right)], tokenize="none").score)


def evaluate(model: nn.Module) -> dict[str, float]:
    """BLEU over held-out sentences, and the share of them that is right word for word."""
    sentences = draw(HELD_OUT, 0)
    written, right = translate(model, sentences), [" ".join(target) for _, target in sentences]
    exact = sum(one == other for one, other in zip(written, right, strict=True)) / HELD_OUT
    score = bleu(written, right)
    return {"bleu": score if math.isfinite(score) else 0.0, "exact": exact}


def job(seed: int, optimizer: OptimizerFactory, scheduler: SchedulerFactory | None = None) -> roundelay.Job:
    """The job."""
    return roundelay.Job(
        model=Translator(),
        loss=loss,
        batches=lambda epoch: batches(seed, epoch),
        inputs=lambda batch: ((batch["source"], batch["written"]), {}),
        optimizer=optimizer,
        scheduler=scheduler,
        evaluate=evaluate,
    )
