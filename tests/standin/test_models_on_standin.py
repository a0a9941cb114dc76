"""One half of the suite on the stand-in: models, losses, planted mistakes, and the tests for a GPU."""

from __future__ import annotations

import pytest

from tests.standin.inner import DEADLINE_S, passes

LEFT_OUT = ("over_nccl", "long_attention", "same_bits_twice")
"""What needs torch's CUDA itself, or always holds with the CPU's kernels."""


@pytest.mark.timeout(DEADLINE_S)
def test_models_losses_and_the_tests_for_a_gpu_hold_on_devices() -> None:
    names = ("device", "models", "losses", "optimizers", "planted")
    chosen = f"not ({' or '.join(LEFT_OUT)})"
    passes(*(f"tests/standin/cases/test_{name}.py" for name in names), "tests/gpu", "-k", chosen)
