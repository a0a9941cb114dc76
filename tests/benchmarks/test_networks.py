"""The networks of full size are those that are known by these names: as many parameters, to the last one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundelay
from benchmarks.networks.inception import googlenet, inception_v3
from benchmarks.networks.others import ResidualLSTM, alexnet, vgg16
from benchmarks.networks.resnet import Basic, Bottleneck, residual, resnet
from benchmarks.networks.vit import Block, Tokens, vit


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_they_have_the_published_numbers_of_parameters_for_imagenet() -> None:
    with torch.device("meta"):
        made = {depth: parameters(resnet(depth, 1000)) for depth in (18, 50, 101)}
        transformer = parameters(vit(1000))
        plain = parameters(alexnet(1000)), parameters(vgg16(1000))
        inceptions = parameters(googlenet(1000)), parameters(inception_v3(1000))
    assert made == {18: 11_689_512, 50: 25_557_032, 101: 44_549_160}
    assert transformer == 86_567_656
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
        (lambda: vit(10), 224),
        (lambda: vit(10, side=64, width=24, layers=2, heads=3), 64),
        (lambda: residual(Basic, (1, 1), 10, width=4), 24),
        (lambda: residual(Bottleneck, (1, 2, 1), 10, width=4, small=True), 8),
    ],
    ids=[
        *("resnet18", "resnet50", "vgg16", "resnet101", "alexnet", "googlenet small", "googlenet", "inception_v3"),
        *("vit", "tiny vit", "tiny basic", "tiny bottleneck"),
    ],
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


def test_a_bottleneck_strides_in_its_convolution_of_3_x_3() -> None:
    block = Bottleneck(8, 4, 2)
    assert (block.narrow.stride, block.middle.stride, block.widen.stride) == ((1, 1), (2, 2), (1, 1))
    assert block(torch.zeros(1, 8, 6, 6)).shape == (1, 16, 3, 3)


def test_a_block_of_the_vision_transformer_computes_what_torch_s_own_layer_does() -> None:
    torch.manual_seed(0)
    block, width = Block(12, 3), 12
    theirs = nn.TransformerEncoderLayer(
        width, 3, 4 * width, 0.0, "gelu", layer_norm_eps=1e-6, batch_first=True, norm_first=True
    )
    ours = block.attention
    projections = torch.cat([layer.weight for layer in (ours.query, ours.key, ours.value)])
    shifts = torch.cat([layer.bias for layer in (ours.query, ours.key, ours.value)])
    theirs.self_attn.in_proj_weight, theirs.self_attn.in_proj_bias = nn.Parameter(projections), nn.Parameter(shifts)
    theirs.self_attn.out_proj = ours.joined  # type: ignore[assignment]
    theirs.linear1, theirs.linear2 = block.perceptron[0], block.perceptron[2]  # type: ignore[assignment]
    x = torch.randn(2, 5, width)
    torch.testing.assert_close(block(x), theirs(x))


def test_tokens_of_an_image_are_its_patches_row_by_row_behind_the_class_token() -> None:
    tokens = Tokens(32, 4)
    nn.init.zeros_(tokens.positions)
    nn.init.ones_(tokens.first)
    image = torch.randn(1, 3, 32, 32)
    found = tokens(image)[0]
    assert torch.equal(found[0], torch.ones(4))
    weight, bias = tokens.patches.weight, tokens.patches.bias
    assert bias is not None
    for place, corner in enumerate(((0, 0), (0, 16), (16, 0), (16, 16)), 1):
        patch = image[0, :, corner[0] : corner[0] + 16, corner[1] : corner[1] + 16]
        torch.testing.assert_close(found[place], (weight * patch).sum((1, 2, 3)) + bias)
    nn.init.normal_(tokens.positions)
    torch.testing.assert_close(tokens(image)[0], found + tokens.positions[0])


@pytest.mark.parametrize(
    "model",
    [lambda: residual(Bottleneck, (1,), 5, width=4), lambda: vit(5, side=32, width=8, layers=1, heads=2)],
    ids=["residual", "vit"],
)
def test_tiny_ones_compute_in_stages_what_the_reference_does(model: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    data = [(torch.randn(4, 3, 32, 32), torch.randint(5, (4,))) for _ in range(2)]
    job = roundelay.Job(
        model=model(),
        loss=lambda outputs, batch: F.cross_entropy(outputs, batch[1]),
        batches=lambda epoch: data,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )
    plan = roundelay.plan(job, workers=2, rule="cdp-v2", micro_batches=2, cuts="equal")
    found = roundelay.verify(job, plan=plan, steps=2)
    assert found.equal, found.differences()
