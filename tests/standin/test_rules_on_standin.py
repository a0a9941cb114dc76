"""One half of the suite on the stand-in: what a plan can say. The other: ``test_models_on_standin.py``."""

from __future__ import annotations

import pytest

from tests.standin.inner import DEADLINE_S, passes


@pytest.mark.timeout(DEADLINE_S)
def test_rules_options_layouts_and_checkpoints_hold_on_devices() -> None:
    passes("tests/standin/cases/test_rules.py", "tests/standin/cases/test_checkpoints.py")
