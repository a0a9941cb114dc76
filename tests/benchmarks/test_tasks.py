"""The tasks that the papers' benchmarks train on: what is said of them holds."""

from __future__ import annotations

import random
import sys

import pytest
import torch
from torch import nn

from benchmarks.tasks import chars, grammar, images
from roundelay.errors import UsageError


def nearest(pixels: torch.Tensor) -> torch.Tensor:
    """The only class whose pattern, rolled somehow, is within the noise of every pixel."""
    found = torch.full((len(pixels),), -1)
    for down in range(images.SIDE):
        for across in range(images.SIDE):
            rolled = images.patterns().roll((down, across), (2, 3))
            near = (pixels[:, None] - rolled).abs().amax((2, 3, 4)) <= images.NOISE + 1e-5
            assert not ((found >= 0) & near.any(1) & (near.int().argmax(1) != found)).any()
            found = torch.where(near.any(1), near.int().argmax(1), found)
    return found


def test_the_bayes_error_of_the_images_is_the_share_of_flipped_labels() -> None:
    assert images.least_difference() > 2 * images.NOISE  # so an image tells its class with certainty
    pixels, labels = images.draw(4000, 5)
    kinds = nearest(pixels)
    assert (kinds >= 0).all()
    wrong = float((kinds != labels).float().mean())
    assert wrong == pytest.approx(images.FLIPPED, abs=0.02)
    spread = torch.bincount(labels[kinds != labels], minlength=images.CLASSES)
    assert (spread > 0).all()


def test_images_are_the_same_for_the_same_seed_and_epoch_alone() -> None:
    one, same, other = (next(images.batches(1, epoch)) for epoch in (0, 0, 1))
    assert torch.equal(one[0], same[0])
    assert not torch.equal(one[0], other[0])
    assert one[0].shape == (images.ROWS, images.COLOURS, images.SIDE, images.SIDE)


@pytest.mark.parametrize("name", images.NETWORKS)
def test_a_network_on_images_answers_for_every_class(name: str) -> None:
    model = images.NETWORKS[name]()
    assert model(images.draw(3, 0)[0]).shape == (3, images.CLASSES)
    found = images.evaluate(model.eval())
    assert 0 <= found["accuracy"] <= found["top5"] <= 1


class Knows(nn.Module):
    """Stands for a translator that knows the grammar: looks each sentence up and says its next word."""

    def __init__(self, sentences: list[grammar.Sentence]) -> None:
        super().__init__()
        batch = grammar.encode(sentences)
        self.known = {
            tuple(row.tolist()): following for row, following in zip(batch["source"], batch["next"], strict=True)
        }

    def forward(self, source: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
        following = torch.stack([self.known[tuple(row.tolist())] for row in source])
        return nn.functional.one_hot(following, len(grammar.vocabularies()[1])).float()


def test_every_source_sentence_has_one_translation_and_fits() -> None:
    translations: dict[tuple[str, ...], tuple[str, ...]] = {}
    for source, target in grammar.draw(20_000, 3):
        assert translations.setdefault(tuple(source), tuple(target)) == tuple(target)
        assert len(source) <= grammar.SOURCE_LENGTH
        assert len(target) < grammar.TARGET_LENGTH
    assert max(map(len, translations)) == grammar.SOURCE_LENGTH
    assert max(map(len, translations.values())) == grammar.TARGET_LENGTH - 1
    ours, theirs = grammar.vocabularies()
    assert {word for sentence in translations for word in sentence} == set(ours[3:])
    assert {word for sentence in translations.values() for word in sentence} == set(theirs[3:])


def test_a_sentence_is_moved_and_bent() -> None:
    source, target = next(s for s in grammar.draw(5000, 1) if len(s[0]) == 9 and "not" in s[0] and "today" in s[0])
    assert source[-1] == "today"
    assert target[0] == grammar.ADVERBS["today"]
    assert target[-1].endswith("as")
    assert target[-2] == "ne"
    assert grammar.sentence(random.Random(4)) == grammar.sentence(random.Random(4))


def test_bleu_of_the_right_translation_is_100_and_of_another_far_less() -> None:
    sentences = grammar.draw(grammar.HELD_OUT, 0)
    found = grammar.evaluate(Knows(sentences))
    assert found == {"bleu": pytest.approx(100.0), "exact": 1.0}
    right = [" ".join(target) for _, target in sentences]
    assert grammar.bleu(right[1:] + right[:1], right) < 30
    torch.manual_seed(0)
    assert grammar.evaluate(grammar.Translator().eval())["bleu"] < 5


def test_the_translator_does_not_see_the_words_that_it_is_to_write_nor_padding() -> None:
    torch.manual_seed(0)
    model = grammar.Translator().eval()
    batch = grammar.encode(grammar.draw(4, 0))
    logits = model(batch["source"], batch["written"])
    later = batch["written"].clone()
    later[:, 4:] = 5
    assert torch.allclose(model(batch["source"], later)[:, :4], logits[:, :4], atol=1e-5)
    padded = batch["source"] == grammar.PAD
    assert padded.any()
    with torch.no_grad():
        model.read.weight[grammar.PAD] += 1
    assert torch.allclose(model(batch["source"], batch["written"]), logits, atol=1e-5)


def test_without_sacrebleu_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(UsageError, match="pip install sacrebleu"):
        grammar.bleu(["a"], ["a"])


def test_characters_are_those_behind_their_contexts() -> None:
    text = torch.arange(40, dtype=torch.uint8)
    contexts, following = chars.draw(text, torch.tensor([0, 7]))
    assert contexts[1].tolist() == list(range(7, 7 + chars.CONTEXT))
    assert following.tolist() == [chars.CONTEXT, 7 + chars.CONTEXT]
    torch.manual_seed(0)
    found = chars.evaluate(chars.model().eval())
    assert found["accuracy"] < 0.2
    assert 5 < found["bits_per_char"] < 9
