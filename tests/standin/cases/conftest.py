"""The cases need a CUDA device, one of the stand-in or a real one: without any nothing here is collected."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

collect_ignore_glob = [] if torch.cuda.device_count() else ["test_*"]


@pytest.fixture(autouse=True)
def no_races() -> Iterator[None]:
    """No stream has used what another had not finished with; a GPU would show it rarely, the stand-in always does."""
    device = sys.modules.get("tests.standin.device")
    before = len(device.races()) if device else 0
    yield
    found = device.races(before) if device else []
    assert found[:10] == []
