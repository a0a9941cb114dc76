"""The models of the zoo on devices, each bit for bit its reference."""

from __future__ import annotations

import pytest

from tests.standin.matrix import Case, models, run

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # kernels that a GPU has in no deterministic form


LARGE = ("llama", "bert_classifier", "t5")
"""Those whose capture takes seconds are left to the table."""

CASES = [case for case in models() if case.place == "one" and case.model not in LARGE]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_model_on_a_device_is_its_reference(case: Case) -> None:
    assert run(case) == ""
