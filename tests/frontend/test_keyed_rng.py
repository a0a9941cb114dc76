"""Random numbers depend on seed, micro-batch and place alone."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from roundelay.errors import DeadlineError
from roundelay.frontend import RngKey
from roundelay.frontend.stages import keyed_rng
from roundelay.frontend.stages.keyed_rng import DEFAULT_GENERATOR_LOCK, keyed_attention, keyed_call, keyed_dropout
from roundelay.ir.graph import LOSS
from tests.frontend.cutting import (
    DRAW,
    MODES,
    buffers_of,
    captured_of,
    cut_after,
    differing,
    even_cuts,
    forwards,
    run,
    sample,
    weights_of,
)
from tests.zoo import ZOO

aten = torch.ops.aten
HEADS = (2, 3, 5, 4)
DRAWING = [name for name, entry in ZOO.items() if entry.draws]


@pytest.mark.parametrize("name", DRAWING)
def test_the_same_key_draws_the_same_whatever_the_stages_and_repetitions_and_another_key_others(name: str) -> None:
    captured, batch = captured_of(name), sample(name)
    params = weights_of(captured)

    def loss(num_stages: int, draw: RngKey) -> float:
        made = forwards(captured, even_cuts(captured, num_stages), batch, params, buffers_of(captured), draw=draw)
        return float(made[-1].outputs[LOSS])

    wanted = loss(1, RngKey(0, 3))
    assert [loss(n, RngKey(0, 3)) for n in (1, 2, 4)] == [wanted] * 3
    torch.manual_seed(99)
    assert loss(2, RngKey(0, 3)) == wanted
    assert loss(2, RngKey(0, 4)) != wanted
    assert loss(2, RngKey(1, 3)) != wanted


def test_a_repeated_forward_of_one_tape_draws_the_same() -> None:
    captured, batch = captured_of("dropout_heavy"), sample("dropout_heavy")
    params, cut = weights_of(captured), even_cuts(captured, 2)
    stash, again = (run(captured, cut, batch, params, mode=mode).grads for mode in ("stash", "recompute"))
    assert differing(stash, again) == []


@given(st.tuples(st.integers(0, 2**70), st.integers(0, 2**40), st.integers(0, 10**6)))
def test_keys_of_neighbours_differ(key: tuple[int, int, int]) -> None:
    seed, g, position = key
    keys = {RngKey(s, m).key(p) for s in (seed, seed + 1) for m in (g, g + 1) for p in (position, position + 1)}
    assert len(keys) == 8
    assert all(0 <= k < 2**63 for k in keys)


def test_swapping_seed_micro_batch_and_position_gives_other_keys() -> None:
    orders = [(1, 2, 3), (1, 3, 2), (2, 1, 3), (2, 3, 1), (3, 1, 2), (3, 2, 1)]
    assert len({RngKey(s, g).key(p) for s, g, p in orders}) == 6


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dropout_equals_torchs_bit_for_bit_at_the_same_generator_state(p: float, dtype: torch.dtype) -> None:
    x = torch.randn(7, 33, dtype=dtype)
    torch.manual_seed(DRAW.key(4))
    assert torch.equal(keyed_dropout(x, p, True, draw=DRAW, position=4), aten.dropout.default(x, p, True))
    assert torch.equal(keyed_dropout(x, p, False, draw=DRAW, position=4), x)
    assert keyed_dropout(torch.zeros(0, 3), p, True, draw=DRAW, position=4).shape == (0, 3)


def test_dropouts_mask_does_not_depend_on_how_the_tensor_lies_in_memory() -> None:
    x = torch.randn(6, 9)
    turned = x.t().contiguous().t()
    assert not turned.is_contiguous()
    drawn = [keyed_dropout(one, 0.5, True, draw=DRAW, position=0) for one in (x, turned)]
    assert torch.equal(*drawn)


@pytest.mark.parametrize("operator", [aten.rand_like.default, aten.bernoulli.default, aten.randn_like.default])
def test_other_draws_do_not_depend_on_how_the_tensor_lies_in_memory(operator: Callable[..., Tensor]) -> None:
    x = torch.rand(6, 9)
    drawn = [keyed_call(operator, one, draw=DRAW, position=0) for one in (x, x.t().contiguous().t())]
    assert torch.equal(*drawn)


class Turned(nn.Module):
    """Draws over transposed tensors."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of x."""
        out: Tensor = self.last(self.draw(self.first(x).t()).t())
        return out


TURNED: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda h: functional.dropout(h, 0.5, True),
    "rand_like": lambda h: h + torch.rand_like(h),
    "alpha_dropout": lambda h: functional.alpha_dropout(h, 0.5, True),
}


@pytest.mark.parametrize("kind", TURNED)
def test_a_cut_before_a_draw_over_a_transposed_tensor_changes_no_number(kind: str) -> None:
    from roundelay.frontend import capture

    batch = {"x": torch.randn(4, 6), "y": torch.randn(4, 6)}
    captured = capture(
        Turned(TURNED[kind]), lambda o, b: functional.mse_loss(o, b["y"]), batch, lambda b: ((b["x"],), {})
    )
    params, names = weights_of(captured), [op.name for op in captured.graph.ops]
    losses = [run(captured, cut_after(captured, cut), batch, params).loss for cut in ([], [names.index("t")])]
    assert torch.allclose(*losses, atol=1e-6)


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """softmax(q kᵀ scale + mask) v, written out."""
    scores = torch.einsum("bhle,bhse->bhls", q, k) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return torch.einsum("bhls,bhse->bhle", scores.softmax(-1), v)


MASKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "boolean": {"attn_mask": torch.ones(5, 5, dtype=torch.bool).tril(1)},
    "additive": {"attn_mask": torch.linspace(-2, 2, 25).view(5, 5)},
    "scale": {"scale": 0.7},
}


@pytest.mark.parametrize("kind", MASKS)
def test_attention_equals_torchs_and_the_formula(kind: str) -> None:
    q, k, v = (torch.randn(HEADS) for _ in range(3))
    options = MASKS[kind]
    got = keyed_attention(q, k, v, dropout_p=0.0, draw=DRAW, position=0, **options)
    mask = torch.ones(5, 5, dtype=torch.bool).tril() if options.get("is_causal") else options.get("attn_mask")
    assert torch.allclose(got, functional.scaled_dot_product_attention(q, k, v, **options), atol=1e-6)
    assert torch.allclose(got, reference(q, k, v, mask, options.get("scale", 0.5)), atol=1e-6)


@pytest.mark.parametrize("kind", MASKS)
def test_attention_with_dropout_equals_torchs_at_the_same_generator_state(kind: str) -> None:
    q, k, v = (torch.randn(HEADS) for _ in range(3))
    torch.manual_seed(DRAW.key(2))
    wanted = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.3, **MASKS[kind])
    assert torch.equal(keyed_attention(q, k, v, dropout_p=0.3, draw=DRAW, position=2, **MASKS[kind]), wanted)


def test_attention_shares_keys_among_groups_of_queries_as_torch_does() -> None:
    q, k = torch.randn(2, 4, 5, 3), torch.randn(2, 2, 5, 3)
    got = keyed_attention(q, k, k, dropout_p=0.0, enable_gqa=True, draw=DRAW, position=0)
    wanted = functional.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    assert torch.allclose(got, wanted, atol=1e-6)


def test_a_row_that_may_attend_to_nothing_is_zero_as_torch_has_it() -> None:
    q = torch.randn(HEADS)
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[1] = False
    for given_mask in (mask, torch.zeros(5, 5).masked_fill(~mask, float("-inf"))):
        got = keyed_attention(q, q, q, given_mask, 0.1, draw=DRAW, position=0)
        assert torch.equal(got[:, :, 1], torch.zeros(2, 3, 4))
        assert got.isfinite().all()


def test_other_random_operators_leave_the_process_generator_as_it_was_even_when_they_fail() -> None:
    before = torch.get_rng_state()
    drawn = keyed_call(torch.rand, 3, draw=DRAW, position=0)
    with pytest.raises(RuntimeError):
        keyed_call(torch.rand, -1, draw=DRAW, position=0)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(DRAW.key(0))
    assert torch.equal(drawn, torch.rand(3))
    assert not torch.equal(drawn, keyed_call(torch.rand, 3, draw=DRAW, position=1))


@pytest.mark.parametrize("name", ["dropout_heavy", "lstm", "gpt2"])
def test_a_stage_leaves_the_process_generator_as_it_was(name: str) -> None:
    captured = captured_of(name)
    before = torch.get_rng_state()
    for mode in MODES:
        run(captured, even_cuts(captured, 2), sample(name), weights_of(captured), mode=mode)
    assert torch.equal(before, torch.get_rng_state())


def test_two_threads_that_draw_at_once_get_what_they_get_one_after_the_other() -> None:
    captured, batch = captured_of("dropout_heavy"), sample("dropout_heavy")
    params, cut = weights_of(captured), even_cuts(captured, 1)

    def losses(seed: int) -> list[float]:
        draws = [RngKey(seed, g) for g in range(25)]
        made = [forwards(captured, cut, batch, params, {}, draw=draw)[-1] for draw in draws]
        return [float(one.outputs[LOSS]) for one in made]

    wanted = [losses(0), losses(1)]
    got: list[list[float]] = [[], []]
    start = threading.Barrier(2, timeout=30)

    def draw_all(seed: int) -> None:
        start.wait()
        got[seed] = losses(seed)

    threads = [threading.Thread(target=draw_all, args=(seed,)) for seed in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert got == wanted
    assert len(set(wanted[0])) == 25


def test_on_a_device_its_own_generator_is_seeded_and_put_back_beside_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.Generator().manual_seed(5)
    monkeypatch.setattr("torch.cuda.default_generators", (torch.Generator(), own))
    states = own.get_state(), torch.random.get_rng_state()

    def drawn(g: int) -> list[torch.Tensor]:
        return keyed_call(
            lambda: [torch.rand(3, generator=own), torch.rand(3)],
            draw=RngKey(1, g),
            position=2,
            on=torch.device("cuda", 1),
        )

    first, again, other = drawn(4), drawn(4), drawn(5)
    assert all(torch.equal(a, b) and not torch.equal(a, c) for a, b, c in zip(first, again, other, strict=True))
    assert torch.equal(own.get_state(), states[0])
    assert torch.equal(torch.random.get_rng_state(), states[1])


def test_the_default_generator_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyed_rng, "LONGEST_HELD_S", 0.1)
    taken, over = threading.Event(), threading.Event()

    def hang() -> None:
        with keyed_rng.DEFAULT_GENERATOR_LOCK:
            taken.set()
            over.wait(20)

    thread = threading.Thread(target=hang)
    thread.start()
    assert taken.wait(20)
    with pytest.raises(DeadlineError, match="default generator"):
        keyed_call(torch.rand, 3, draw=RngKey(1, 0), position=0)
    over.set()
    thread.join()
    assert keyed_call(torch.rand, 3, draw=RngKey(1, 0), position=0).shape == (3,)


def takes_it_in_a_child(leave: bool) -> bool:
    """Whether a forked child can take the lock, and leave it once more than it has taken it itself."""
    child = os.fork()
    if not child:
        signal.alarm(10)
        with DEFAULT_GENERATOR_LOCK:
            pass
        if leave:
            DEFAULT_GENERATOR_LOCK.__exit__()
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def test_a_forked_child_takes_the_lock_that_a_thread_left_behind_holds() -> None:
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with DEFAULT_GENERATOR_LOCK:
            held.set()
            release.wait(30.0)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert held.wait(30.0)
        assert takes_it_in_a_child(leave=False)
    finally:
        release.set()
        thread.join()


def test_what_the_forking_thread_holds_its_child_holds_as_well() -> None:
    with DEFAULT_GENERATOR_LOCK:
        assert takes_it_in_a_child(leave=True)


PLAINLY: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, RngKey], Tensor]]] = {
    "dropout": (
        lambda x: aten.dropout.default(x, 0.4, True),
        lambda x, draw: keyed_dropout(x, 0.4, True, draw=draw, position=0),
    ),
    "attention": (
        lambda x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.3, is_causal=True, scale=0.5),
        lambda x, draw: keyed_attention(x, x, x, None, 0.3, True, scale=0.5, draw=draw, position=0),
    ),
    "rand_like": (torch.rand_like, lambda x, draw: keyed_call(aten.rand_like.default, x, draw=draw, position=0)),
    "bernoulli": (
        lambda x: torch.bernoulli(x.sigmoid()),
        lambda x, draw: keyed_call(aten.bernoulli.default, x.sigmoid(), draw=draw, position=0),
    ),
}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", PLAINLY)
def test_plain_draws_are_torchs_own_and_come_again_when_a_forward_does(name: str, turned: bool) -> None:
    theirs, ours = PLAINLY[name]
    x = torch.randn(2, 3, 5, 5)
    x = x.transpose(1, 3) if turned else x
    draw = RngKey.plain(0, 1)
    torch.manual_seed(7)
    wanted, behind = theirs(x), torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(ours(x, draw), wanted)
    assert torch.equal(torch.rand(3), behind)  # as much was drawn
    torch.manual_seed(8)
    assert torch.equal(ours(x, draw), wanted)  # again, whatever has been drawn since
    assert torch.equal(torch.rand(3), _first_of(8))  # and nothing of what is drawn next
    assert not torch.equal(ours(x, RngKey.plain(0, 1)), wanted)


def _first_of(seed: int) -> Tensor:
    return torch.rand(3, generator=torch.Generator().manual_seed(seed))
