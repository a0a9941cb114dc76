"""What the table of ignored options edits is still there, and so are its tests; ``make options`` runs them."""

from __future__ import annotations

import ast

import pytest

from tests.options.breaks import BREAKS, Break, Edit
from tests.options.table import PACKAGE, ROOT, edited


@pytest.mark.parametrize("one", BREAKS, ids=[one.option for one in BREAKS])
def test_an_edit_still_changes_the_source_and_its_test_exists(one: Break) -> None:
    for edit in one.edits:
        text = (PACKAGE / edit.file).read_text(encoding="utf-8")
        assert ast.dump(ast.parse(edited(text, edit))) != ast.dump(ast.parse(text))
    path, _, name = one.test[0].partition("::")
    text = (ROOT / path).read_text(encoding="utf-8")
    assert f"def {name.partition('[')[0]}(" in text if name else one.test[1] == "-k"


def test_options_are_told_apart() -> None:
    assert len({one.option for one in BREAKS}) == len(BREAKS)


def test_an_edit_of_what_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="stands there 0 times"):
        edited("text", Edit("file.py", "nothing", "something"))
