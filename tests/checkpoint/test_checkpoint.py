"""Checkpoints come back bit for bit, or not at all."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from roundelay.checkpoint import stored_files
from roundelay.checkpoint.checkpoint import Checkpoint, Facts, Position, load, load_into, prepare
from roundelay.checkpoint.stored_files import is_checkpoint, write_state
from roundelay.errors import CheckpointError, InternalError, RunError
from tests.checkpoint.whole import complete, held, save
from tests.observe.harness import dying, forked, status

STATE, MANIFEST = "stage-0.worker-0.update-{}.safetensors", "checkpoint.json"


def files(updates: int) -> tuple[str, str]:
    """The files of a checkpoint with one holder."""
    return STATE.format(updates), MANIFEST


def checkpoint(
    updates: int = 0,
    parameters: dict[str, torch.Tensor] | None = None,
    buffers: dict[str, torch.Tensor] | None = None,
    optimizer: dict[str, dict[str, Any]] | None = None,
) -> Checkpoint:
    """A checkpoint whose every value tells ``updates``."""
    number = torch.full((4, 3), float(updates))
    return Checkpoint(
        parameters={"w": number} if parameters is None else parameters,
        buffers=buffers or {},
        optimizer={"w": {"exp_avg": number + 0.5, "step": updates}} if optimizer is None else optimizer,
        position=Position(updates, 4 * updates, 1, 2),
        seed=7,
        fingerprint="f" * 64,
        rule="pipeoptim",
        num_stages=3,
    )


def check_whole(path: Path, among: range) -> int:
    """Everything at ``path`` is of one and the same save; its number."""
    found = load(path)
    number = found.position.updates
    assert number in among
    assert torch.equal(found.parameters["w"], torch.full((4, 3), float(number)))
    assert torch.equal(found.optimizer["w"]["exp_avg"], torch.full((4, 3), number + 0.5))
    assert found.optimizer["w"]["step"] == number
    return number


def same(a: Any, b: Any) -> bool:
    """Same type and same bits."""
    if not isinstance(a, torch.Tensor):
        return type(a) is type(b) and (a == b or (a != a and b != b))
    bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)


STATES: list[Any] = [
    torch.tensor(3.0),
    torch.tensor(2**62 + 1),
    torch.tensor(True),
    torch.tensor([True, False]),
    torch.tensor([1.0, math.nan, -0.0, math.inf, 1e-40]),
    torch.tensor([1.0, 3.14159, 1e30], dtype=torch.bfloat16),
    torch.tensor([1, -(2**63)]),
    torch.zeros(0, 3),
    torch.ones(2, dtype=torch.complex64),
    1,
    1.0,
    True,
    False,
    None,
    "text",
    2**80,
    0.1,
    -0.0,
    5e-324,
    math.inf,
    -math.inf,
    math.nan,
]


def test_every_kind_of_state_comes_back_with_its_type_and_bits(tmp_path: Path) -> None:
    state = {f"k{i}": value for i, value in enumerate(STATES)}
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    given = checkpoint(3, parameters=tensors, buffers={"b" + n: t for n, t in tensors.items()}, optimizer={"p": state})
    save(tmp_path / "c", given, {})
    found = load(tmp_path / "c")
    for mine, theirs in (
        (found.parameters, given.parameters),
        (found.buffers, given.buffers),
        (found.optimizer["p"], state),
    ):
        assert list(mine) == list(theirs)
        assert [name for name in mine if not same(mine[name], theirs[name])] == []
    assert found.position == Position(3, 12, 1, 2)
    assert (found.seed, found.fingerprint, found.rule, found.num_stages) == (7, "f" * 64, "pipeoptim", 3)


@settings(max_examples=30)
@given(value=st.none() | st.booleans() | st.integers() | st.floats() | st.text())
def test_any_plain_state_value_comes_back(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    path = tmp_path_factory.mktemp("c")
    save(path, checkpoint(parameters={}, optimizer={"p": {"k": value}}), {})
    assert same(load(path).optimizer["p"]["k"], value)


def test_parameters_without_state_keep_their_place(tmp_path: Path) -> None:
    save(tmp_path / "c", checkpoint(optimizer={"b": {}, "a": {}}), {})
    assert list(load(tmp_path / "c").optimizer.items()) == [("b", {}), ("a", {})]


def test_names_with_slashes_do_not_meet(tmp_path: Path) -> None:
    optimizer = {"a": {"b/c": torch.tensor(1.0)}, "a/b": {"c": torch.tensor(2.0)}}
    save(tmp_path / "c", checkpoint(optimizer=optimizer), {})
    assert load(tmp_path / "c").optimizer == optimizer


def test_strided_and_shared_memory_is_no_obstacle(tmp_path: Path) -> None:
    flat = torch.arange(12.0)
    parameters = {"a": flat[:6].view(2, 3).t(), "b": flat[3:9], "c": flat, "d": torch.ones(1).expand(4)}
    save(tmp_path / "c", checkpoint(parameters=parameters), {})
    found = load(tmp_path / "c").parameters
    assert all(same(found[name], parameters[name]) for name in parameters)


def test_the_files_can_be_read_without_us(tmp_path: Path) -> None:
    save(tmp_path / "c", checkpoint(2), {})
    assert {path.name for path in (tmp_path / "c").iterdir()} == set(files(2))
    assert load_file(tmp_path / "c" / STATE.format(2)).keys() == {"w", "w/exp_avg"}
    document = json.loads((tmp_path / "c" / MANIFEST).read_text())
    assert document["format"] == stored_files.FORMAT
    (holder,) = document["content"]["holders"]
    assert holder["file"] == STATE.format(2)
    assert holder["sha256"] == hashlib.sha256((tmp_path / "c" / STATE.format(2)).read_bytes()).hexdigest()
    assert holder["table"]["parameters"] == {"w": [[0, 4], [0, 3]]}
    modes = {path.stat().st_mode for path in (tmp_path / "c").iterdir()}
    assert len(modes) == 1  # whoever may read one of them may read all


def test_a_save_replaces_the_one_before_and_leaves_nothing_else(tmp_path: Path) -> None:
    for number in range(3):
        save(tmp_path / "deep" / "c", checkpoint(number), {})
    assert check_whole(tmp_path / "deep" / "c", range(2, 3)) == 2
    assert {path.name for path in (tmp_path / "deep" / "c").iterdir()} == set(files(2))


def test_another_save_of_the_same_update_does_not_touch_the_files_of_the_first(tmp_path: Path) -> None:
    """A run that was continued from an earlier checkpoint comes to the same update again."""
    save(tmp_path / "c", checkpoint(2), {})
    first = (tmp_path / "c" / STATE.format(2)).read_bytes()
    again = write_state(tmp_path / "c", held(checkpoint(2))[0], 0, 2)
    assert again.file != STATE.format(2)
    assert (tmp_path / "c" / STATE.format(2)).read_bytes() == first
    save(tmp_path / "c", checkpoint(2), {})
    assert len(list((tmp_path / "c").iterdir())) == 2
    check_whole(tmp_path / "c", range(2, 3))


def test_files_of_a_later_checkpoint_outlive_the_completion_of_an_earlier_one(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    later = write_state(folder, held(checkpoint(5))[0], 0, 5)
    complete(folder, checkpoint(4), held(checkpoint(4)), {})
    assert {path.name for path in folder.iterdir()} == {later.file, *files(4)}
    prepare(folder)  # the next run
    assert {path.name for path in folder.iterdir()} == set(files(4))


def test_what_killed_processes_leave_is_removed_before_the_next_run(tmp_path: Path) -> None:
    for name in (".tmpVPrMsP", ".checkpoint.json.part", ".probe-0f", ".stage-0.worker-0.update-3.safetensors.part"):
        (tmp_path / name).touch()
    prepare(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_manifest_that_cannot_be_read_now_costs_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "c", checkpoint(1), {})

    def busy(path: Path) -> bytes:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", busy)
        prepare(tmp_path / "c")
    check_whole(tmp_path / "c", range(1, 2))


def test_a_manifest_never_names_files_that_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run in the same folder, or a restart, removes what it finds unfinished, however late that is."""
    save(tmp_path / "c", checkpoint(1), {})
    real = os.fsync

    def slow(file: int) -> None:
        real(file)
        if list((tmp_path / "c").glob(".checkpoint.json.part")):
            prepare(tmp_path / "c")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", slow)
        with pytest.raises(RunError, match="another run has removed"):
            save(tmp_path / "c", checkpoint(2), {})
    check_whole(tmp_path / "c", range(1, 2))


def test_a_save_through_a_link_replaces_what_it_names(tmp_path: Path) -> None:
    save(tmp_path / "run" / "c", checkpoint(1), {})
    (tmp_path / "latest").symlink_to("run")
    (tmp_path / "link").symlink_to("run/c")
    save(tmp_path / "latest" / "c", checkpoint(2), {})
    save(tmp_path / "link", checkpoint(3), {})
    assert (tmp_path / "link").is_symlink()
    assert check_whole(tmp_path / "run" / "c", range(3, 4)) == check_whole(tmp_path / "link", range(3, 4))


def test_notes_laid_into_a_checkpoint_outlive_the_next_save(tmp_path: Path) -> None:
    save(tmp_path / "c", checkpoint(1), {})
    (tmp_path / "c" / "notes.txt").write_text("good one")
    (tmp_path / "c" / "plots").mkdir()
    save(tmp_path / "c", checkpoint(2), {})
    assert (tmp_path / "c" / "notes.txt").read_text() == "good one"
    assert (tmp_path / "c" / "plots").is_dir()


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_is_no_checkpoint_is_never_replaced(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "home"
    if kind == "folder":
        path.mkdir()
    precious = path / "weights.safetensors" if kind == "folder" else path
    precious.write_text("precious")
    with pytest.raises(CheckpointError, match="something else"):
        save(path, checkpoint(), {})
    assert precious.read_text() == "precious"


@pytest.mark.parametrize("value", [[1], torch.Size([1]), {"a": 1}, object(), np.float64(1)])
def test_a_state_value_that_would_not_come_back_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"'k' of parameter 'p'.*" + type(value).__name__):
        save(tmp_path / "c", checkpoint(optimizer={"p": {"k": value}}), {})
    assert not list(tmp_path.rglob("*.safetensors*"))


@pytest.mark.parametrize("tensor", [torch.ones(2, dtype=torch.complex128), torch.eye(2).to_sparse()])
def test_a_tensor_that_cannot_be_stored_is_refused_and_the_old_one_kept(tmp_path: Path, tensor: torch.Tensor) -> None:
    save(tmp_path / "c", checkpoint(1), {})
    with pytest.raises(CheckpointError, match="cannot be stored"):
        save(tmp_path / "c", checkpoint(2, parameters={"w": tensor}), {})
    assert check_whole(tmp_path / "c", range(1, 2)) == 1
    assert {path.name for path in (tmp_path / "c").iterdir()} == set(files(1))


@pytest.mark.parametrize("aliases", [{"w": "w"}, {"v": "absent"}])
def test_an_alias_names_a_stored_tensor_and_is_none_itself(tmp_path: Path, aliases: dict[str, str]) -> None:
    with pytest.raises(InternalError, match="alias"):
        save(tmp_path / "c", checkpoint(), aliases)


# Interrupted saves


@pytest.mark.parametrize("failing", ["state", "manifest", "sync"])
def test_a_full_disk_leaves_the_old_one_and_the_next_save_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    save(tmp_path / "c", checkpoint(1), {})

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def half(tensors: Any, file: Path) -> None:
        file.write_bytes(b"half")
        full()

    with monkeypatch.context() as patch:
        if failing == "state":
            patch.setattr(stored_files, "save_file", half)
        if failing == "manifest":
            patch.setattr(Path, "replace", full)
        if failing == "sync":
            patch.setattr(os, "fsync", full)
        with pytest.raises((OSError, RunError), match="No space left on device"):
            save(tmp_path / "c", checkpoint(2), {})
    assert check_whole(tmp_path / "c", range(1, 2)) == 1
    save(tmp_path / "c", checkpoint(3), {})
    assert check_whole(tmp_path / "c", range(3, 4)) == 3
    assert {path.name for path in (tmp_path / "c").iterdir()} == set(files(3))


def test_the_operating_systems_own_refusal_is_told_as_ours(tmp_path: Path) -> None:
    """A limit on file sizes makes safetensors' own write fail, as a full disk does."""
    save(tmp_path / "c", checkpoint(1), {})

    def child() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        with pytest.raises((OSError, SafetensorError), match="too large"):
            save(tmp_path / "c", checkpoint(2, parameters={"w": torch.zeros(4096)}), {})

    assert status(forked(child)) == 0
    assert check_whole(tmp_path / "c", range(1, 2)) == 1


def test_a_kill_at_any_step_leaves_one_whole_checkpoint(tmp_path: Path) -> None:
    """The process dies before its first, second, ... operation on the file system, until it gets through.

    The next save starts from whatever was left, and so meets the leftovers of every kind.
    """
    path = tmp_path / "c"
    save(path, checkpoint(0), {})
    killed, found = 0, 0
    for number in range(1, 200):
        code = status(forked(dying(lambda n=number: save(path, checkpoint(n), {}), number)))
        found = check_whole(path, range(found, number + 1))
        if code == 0:
            break
        assert code == -signal.SIGKILL
        killed += 1
    assert killed > 10
    assert found == number
    assert {entry.name for entry in path.iterdir()} == set(files(number))


def test_a_kill_during_the_first_save_leaves_none_or_a_whole_one(tmp_path: Path) -> None:
    """Where nothing was before, half a checkpoint is none, and the next run saves there."""
    for number in range(1, 200):
        path = tmp_path / str(number)
        code = status(forked(dying(lambda n=number, p=path: save(p, checkpoint(n), {}), number)))
        if is_checkpoint(path):
            check_whole(path, range(number, number + 1))
        else:
            with pytest.raises(CheckpointError, match=r"nothing at this place|no checkpoint\.json"):
                load(path)
        if code == 0:
            assert number > 10
            return
        assert code == -signal.SIGKILL
        save(path, checkpoint(number + 1), {})
        assert check_whole(path, range(number + 1, number + 2))
        assert {entry.name for entry in path.iterdir()} == set(files(number + 1))
    pytest.fail("never got through")


def test_a_kill_at_a_random_moment_leaves_one_whole_checkpoint(tmp_path: Path) -> None:
    """Also inside a write, where no step begins."""
    path = tmp_path / "c"
    save(path, checkpoint(0), {})
    found = 0

    def child(start: int) -> None:
        for number in range(start, 10**6):
            save(path, checkpoint(number), {})

    for attempt in range(12):
        pid = forked(lambda start=found + 1: child(start))
        time.sleep(0.01 + 0.0037 * attempt)
        os.kill(pid, signal.SIGKILL)
        assert status(pid) == -signal.SIGKILL
        found = check_whole(path, range(found, 10**6))
    save(path, checkpoint(found), {})
    assert len(list(path.iterdir())) == 2


def test_a_reader_sees_one_save_or_the_next_never_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another save comes between any two files that the reader opens."""
    save(tmp_path / "c", checkpoint(0), {})
    real, opened = stored_files._tensors, 0

    def late(path: Path, name: str, digest: str) -> Any:
        nonlocal opened
        opened += 1
        if opened <= 2:
            save(tmp_path / "c", checkpoint(opened), {})
        return real(path, name, digest)

    monkeypatch.setattr(stored_files, "_tensors", late)
    assert check_whole(tmp_path / "c", range(6)) == 2


def test_what_was_loaded_outlives_the_next_save(tmp_path: Path) -> None:
    """Its tensors are mapped from files that the next save removes."""
    save(tmp_path / "c", checkpoint(1), {})
    found = load(tmp_path / "c")
    save(tmp_path / "c", checkpoint(2), {})
    assert torch.equal(found.parameters["w"], torch.full((4, 3), 1.0))
    found.parameters["w"].zero_()  # in this process alone
    check_whole(tmp_path / "c", range(2, 3))


# Damaged and foreign checkpoints


def test_every_changed_byte_is_noticed(tmp_path: Path) -> None:
    save(tmp_path / "c", checkpoint(1), {})
    for name in files(1):
        good = (tmp_path / "c" / name).read_bytes()
        for at in range(0, len(good), 7):
            if name == "checkpoint.json" and good[at : at + 1].isspace():
                continue  # blanks mean nothing in JSON
            bad = bytearray(good)
            bad[at] ^= 1
            (tmp_path / "c" / name).write_bytes(bad)
            with pytest.raises(CheckpointError):
                load(tmp_path / "c")
        (tmp_path / "c" / name).write_bytes(good)
    check_whole(tmp_path / "c", range(1, 2))


@pytest.mark.parametrize("name", files(0))
def test_a_lost_or_short_file_is_named(tmp_path: Path, name: str) -> None:
    save(tmp_path / "c", checkpoint(), {})
    file = tmp_path / "c" / name
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(CheckpointError, match=name):
        load(tmp_path / "c")
    file.unlink()
    with pytest.raises(CheckpointError, match=f"no {name}"):
        load(tmp_path / "c")


def edited(path: Path, change: Callable[[dict[str, Any]], None], *, seal: bool) -> None:
    """Change a manifest, and make its digest fit again where ``seal``."""
    document = json.loads((path / "checkpoint.json").read_text())
    change(document)
    if seal:
        document.pop("sha256")
        document["sha256"] = stored_files._digest(document)
    (path / "checkpoint.json").write_text(json.dumps(document))


def test_a_hand_edited_position_is_noticed(tmp_path: Path) -> None:
    save(tmp_path / "c", checkpoint(), {})
    edited(tmp_path / "c", lambda document: document["content"]["facts"]["position"].update(updates=5), seal=False)
    with pytest.raises(CheckpointError, match=r"checkpoint\.json whose content"):
        load(tmp_path / "c")


@pytest.mark.parametrize(
    ("number", "remedy"), [(stored_files.FORMAT + 1, "a newer Roundelay"), (3, "the Roundelay that wrote it")]
)
def test_another_format_is_named_whatever_else_it_holds(tmp_path: Path, number: int, remedy: str) -> None:
    save(tmp_path / "c", checkpoint(), {})
    edited(tmp_path / "c", lambda document: document.update(format=number, sha256="elsewhere"), seal=False)
    with pytest.raises(CheckpointError, match=rf"got format {number}.*{remedy}"):
        load(tmp_path / "c")


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["facts"].pop("seed"),
        lambda content: content["facts"].update(seed="7"),
        lambda content: content["facts"].update(rest=1),
        lambda content: content["facts"]["position"].update(updates=1.5),
        lambda content: content["holders"][0]["table"].update(buffers=["absent"]),
        lambda content: content.update(aliases={"v": "absent"}),
        lambda content: content["holders"][0]["table"].update(optimizer=3),
        lambda content: content["holders"][0]["table"]["optimizer"]["w"].update(exp_avg={"tensor": "absent"}),
        lambda content: content["holders"][0]["table"]["optimizer"]["w"].update(exp_avg={"float": "many"}),
        lambda content: content["holders"][0]["table"]["optimizer"]["w"].update(exp_avg=[1]),
        lambda content: content["holders"][0]["table"]["parameters"].update(w=[[0, 4]]),
        lambda content: content["holders"][0]["table"]["parameters"].update(w=[[0, 4], [0, 2]]),
        lambda content: content["holders"][0]["table"]["parameters"].update(w=[[1, 5], [0, 3]]),
        lambda content: content["shapes"].update(w=[4, 3, 1]),
    ],
)
def test_a_sealed_manifest_that_does_not_fit_is_damaged(tmp_path: Path, change: Callable[..., None]) -> None:
    save(tmp_path / "c", checkpoint(), {})
    edited(tmp_path / "c", lambda document: change(document["content"]), seal=True)
    with pytest.raises(CheckpointError, match="does not fit"):
        load(tmp_path / "c")


def test_the_field_that_does_not_fit_is_named(tmp_path: Path) -> None:
    save(tmp_path / "c", checkpoint(), {})
    edited(tmp_path / "c", lambda document: document["content"]["facts"].update(seed="7"), seal=True)
    with pytest.raises(CheckpointError, match=r"Expected `int`, got `str` - at `\$\.facts\.seed`"):
        load(tmp_path / "c")


@pytest.mark.parametrize("text", ["{}", "[]", "3", '{"kind": "other", "format": 1}', '{"format": 1}'])
def test_another_programs_manifest_is_no_checkpoint(tmp_path: Path, text: str) -> None:
    (tmp_path / "checkpoint.json").write_text(text)
    with pytest.raises(CheckpointError, match="another program's"):
        load(tmp_path)


def test_what_is_not_there_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing at this place"):
        load(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"no checkpoint\.json"):
        load(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError):
        load(tmp_path / "file")
    (tmp_path / "checkpoint.json").mkdir()
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(tmp_path)


# Loading into a model


class Tied(nn.Module):
    """A tied pair, a buffer of each kind."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def of(model: nn.Module, *, scratch: bool = False) -> Checkpoint:
    """A checkpoint of a model's values."""
    buffers = {name: b for name, b in model.named_buffers() if scratch or name != "scratch"}
    return checkpoint(parameters=dict(model.named_parameters()), buffers=buffers, optimizer={})


ALIASES = {"head.weight": "embedding.weight"}


@pytest.mark.parametrize("scratch", [False, True])
def test_a_loaded_model_equals_the_saved_one_and_stays_tied(tmp_path: Path, scratch: bool) -> None:
    saved, model = Tied(), Tied()
    with torch.no_grad():
        for tensor in (*saved.parameters(), *saved.buffers()):
            tensor.copy_(torch.rand(tensor.shape) * 9)
    save(tmp_path / "c", of(saved, scratch=scratch), ALIASES)
    own = model.embedding.weight
    assert load_into(model, tmp_path / "c") is model
    assert model.embedding.weight is own
    assert model.head.weight is own
    assert own.requires_grad
    expected = saved.state_dict()
    assert all(same(value, expected[name]) for name, value in model.state_dict().items())
    assert torch.equal(model.scratch, saved.scratch) == scratch


def test_a_tied_tensor_is_stored_once(tmp_path: Path) -> None:
    save(tmp_path / "c", of(Tied()), ALIASES)
    assert "head.weight" not in load(tmp_path / "c").parameters
    untied = Tied()
    untied.head.weight = nn.Parameter(torch.zeros(5, 3))
    load_into(untied, tmp_path / "c")
    assert torch.equal(untied.head.weight, untied.embedding.weight)


def without(name: str) -> Checkpoint:
    """A checkpoint of :class:`Tied` that lacks one parameter or buffer."""
    whole = of(Tied())
    for values in (whole.parameters, whole.buffers):
        values.pop(name, None)
    return whole


def check_refused(path: Path, saved: Checkpoint, aliases: dict[str, str], match: str) -> None:
    """Loading fails as told, and the model is as it was."""
    save(path, saved, aliases)
    model = Tied()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=match):
        load_into(model, path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_first_wrong_name_or_shape_is_told_and_the_model_untouched(tmp_path: Path) -> None:
    check_refused(tmp_path / "1", without("norm.weight"), ALIASES, "no value for 'norm.weight'")
    check_refused(tmp_path / "2", without("norm.running_var"), ALIASES, "no value for 'norm.running_var'")
    check_refused(tmp_path / "3", of(Tied()), {}, "no value for 'head.weight'")
    check_refused(tmp_path / "4", of(Tied()), {**ALIASES, "other": "norm.bias"}, "a value for 'other'")
    check_refused(tmp_path / "5", of(Tied(4)), ALIASES, r"shape \(5, 4\) for 'embedding.weight'.*\(5, 3\)")
    apart = of(Tied())
    apart.parameters["head.weight"] = torch.zeros(5, 3)
    check_refused(tmp_path / "6", apart, {}, "two values for 'embedding.weight' and 'head.weight'")


def test_a_model_without_memory_cannot_be_loaded_into(tmp_path: Path) -> None:
    save(tmp_path / "c", of(Tied()), ALIASES)
    model = Tied().to("meta")
    with pytest.raises(CheckpointError, match="a model with values"):
        load_into(model, tmp_path / "c")


def test_every_field_of_a_checkpoint_is_in_the_manifest() -> None:
    """A field added to one must be added to the other."""
    stored = {*Facts.__struct_fields__, "parameters", "buffers", "replica_buffers", "optimizer", "flight", "loss_scale"}
    assert set(Checkpoint.__slots__) == stored


def test_a_file_that_goes_before_torch_maps_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "c", checkpoint(0), {})

    def late(file: str, framework: str) -> Any:
        raise RuntimeError(f"unable to open file <{file}> in read-only mode: No such file or directory (2)")

    monkeypatch.setattr(stored_files, "safe_open", late)
    with pytest.raises(CheckpointError, match="cannot be mapped"):
        load(tmp_path / "c")
