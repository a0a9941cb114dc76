"""The networks of full size are those that are known by these names: as many parameters, to the last one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.networks.inception import googlenet, inception_v3
from benchmarks.networks.others import ResidualLSTM, alexnet, vgg16
from benchmarks.networks.resnet import resnet


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_they_have_the_published_numbers_of_parameters_for_imagenet() -> None:
    with torch.device("meta"):
        made = {depth: parameters(resnet(depth, 1000)) for depth in (18, 50, 101)}
        plain = parameters(alexnet(1000)), parameters(vgg16(1000))
        inceptions = parameters(googlenet(1000)), parameters(inception_v3(1000))
    assert made == {18: 11_689_512, 50: 25_557_032, 101: 44_549_160}
    assert plain == (61_100_840, 138_357_544)
    # GoogLeNet is published with a bias for each of its 7280 channels, where BatchNorm has two numbers
    assert inceptions == (6_998_552 + 7280, 23_834_568)


@pytest.mark.parametrize(
    ("model", "side"),
    [
        (lambda: resnet(18, 10, small=True), 32),
        (lambda: resnet(50, 10, small=True), 32),
        (lambda: vgg16(10, small=True), 32),
        (lambda: resnet(101, 10), 224),
        (lambda: alexnet(10), 224),
        (lambda: googlenet(10, small=True), 32),
        (lambda: googlenet(10), 224),
        (lambda: inception_v3(10), 224),
    ],
    ids=["resnet18", "resnet50", "vgg16", "resnet101", "alexnet", "googlenet small", "googlenet", "inception_v3"],
)
def test_images_of_its_size_become_logits(model: type[nn.Module], side: int) -> None:
    with torch.device("meta"):
        assert model().eval()(torch.empty(2, 3, side, side)).shape == (2, 10)


def test_small_images_keep_their_size_until_the_second_stretch() -> None:
    stem = resnet(18, 10, small=True)[:5]
    assert stem(torch.zeros(1, 3, 32, 32)).shape == (1, 64, 32, 32)


def test_the_residual_lstm_reads_to_the_last_word() -> None:
    torch.manual_seed(0)
    model = ResidualLSTM(20, 8, 2, 3)
    words = torch.randint(2, 20, (2, 5))
    other = words.clone()
    other[0, 4] = 1
    first, changed = model(words), model(other)
    assert first.shape == (2, 3)
    assert not torch.equal(first[0], changed[0])
    assert torch.equal(first[1], changed[1])
