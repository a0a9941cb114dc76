"""Under a launcher: the leader says what the stages' states are needed for, and who sees the checkpoint's folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from roundelay.checkpoint.atomic_files import unwritten
from roundelay.checkpoint.stored_files import make_probe
from roundelay.detect_launcher import LEADER
from roundelay.errors import RunError, UsageError
from roundelay.ir.plan import Plan
from roundelay.launching.process_group import ProcessGroup
from roundelay.runtime.state_reports import StateUse


class _Announced(msgspec.Struct, forbid_unknown_fields=True):
    """What the leader publishes; ``probe`` is a file in the checkpoint's folder."""

    use: StateUse
    save_every: int | None
    probe: Path | None


@contextmanager
def announced_use(process_group: ProcessGroup | None, use: StateUse, save_every: int | None) -> Iterator[None]:
    """Publish, as the leader, what the states are needed for; within the context the other processes may ask.

    Args:
        process_group: the launcher's processes; None if there are none.
        use: what the states are needed for.
        save_every: see :class:`roundelay.runtime.loading.checkpoint_schedule.Extent`.

    Raises:
        RunError: the checkpoint's folder cannot be written.
    """
    if process_group is None:
        yield
        return
    try:
        probe = None if use.folder is None else make_probe(use.folder)
    except OSError as error:
        raise unwritten(use.folder or Path(), error) from error
    try:
        announced = _Announced(use, save_every, probe)
        process_group.publish(_name(process_group), msgspec.json.encode(announced, enc_hook=str).decode())
        yield
    finally:
        if probe is not None:
            with suppress(OSError):
                probe.unlink(missing_ok=True)
                probe.parent.rmdir()  # unless there is a checkpoint in it


def fetched_use(process_group: ProcessGroup) -> tuple[StateUse, int | None]:
    """What the leader has published, as another process: that of this process, and the updates between checkpoints.

    A process that does not see the checkpoint's folder, as its host is another, sends its state to the leader.

    Raises:
        WorkerLostError: the leader publishes nothing.
        RunError: what it publishes cannot be read.
    """

    def made(kind: Any, value: Any) -> Any:
        return kind(value)

    text = process_group.fetch(_name(process_group))
    try:
        announced = msgspec.json.decode(text, type=_Announced, dec_hook=made)
    except (msgspec.DecodeError, TypeError, ValueError) as error:
        raise RunError(
            "what the leader says of checkpoints",
            got=str(error),
            expected="a text that Roundelay writes",
            remedy="Check that all processes run the same version of Roundelay.",
        ) from error
    shared = process_group.trusting and (announced.probe is None or announced.probe.is_file())
    return replace(announced.use, shared=shared), announced.save_every


def _name(process_group: ProcessGroup) -> str:
    return f"states {process_group.restart}"


def check_leader_reads(plan: Plan) -> None:
    """Refuse, under a launcher, a plan whose data another process than the leader would read.

    The leader asks the reader for checkpoints and for an early end, through memory of its own process.

    Raises:
        UsageError: stage 0 is on another worker.
    """
    reader = plan.worker_of(0)
    if reader != LEADER:
        raise UsageError(
            "stage 0 of the plan under a launcher",
            got=f"worker {reader}, {plan.workers[reader].name!r}",
            expected=f"worker {LEADER}, which leads the others and reads the data",
            remedy="Exchange the two workers in the plan, or use a transport that needs no launcher.",
        )
