"""Files of a run whose order was free: for each stage what it wrote down, as :mod:`roundelay.observe.action_trace`."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import final

from roundelay.checkpoint.atomic_files import reason_of
from roundelay.checkpoint.checkpoint import load
from roundelay.checkpoint.stored_files import inside_run
from roundelay.errors import RunError, UsageError
from roundelay.ir.plan import Plan
from roundelay.observe.action_trace import ActionTrace, TraceHead, end_line, lines_of, parse
from roundelay.observe.arithmetic import arithmetic
from roundelay.session.events import Event, Restarted, Traced

TRACE = "trace"
"""The folder of a run's traces; of a run that has continued from a checkpoint, ``trace-from-UPDATES``."""

_MOST_BYTES = 1 << 30


def heads_of(plan: Plan, seed: int, first: tuple[int, int]) -> dict[int, TraceHead]:
    """Of what run the traces of its stages are, by stage.

    Args:
        plan: of the run.
        seed: of the run.
        first: the first micro-batch, and the updates before it.
    """
    return {
        stage: TraceHead(
            stage=stage,
            stages=plan.num_stages,
            plan=digest_of(plan),
            model=plan.model,
            seed=seed,
            arithmetic=arithmetic(),
            first=first,
        )
        for stage in range(plan.num_stages)
    }


def digest_of(plan: Plan) -> str:
    """Sixteen hexadecimal digits of a plan's text."""
    return hashlib.sha256(Plan.parse(plan.text()).text().encode()).hexdigest()[:16]  # as a file of it is read


def folder_of(run: Path, updates: int) -> Path:
    """The folder of the traces of a run, or of its part that began after so many updates."""
    return run / (f"{TRACE}-from-{updates}" if updates else TRACE)


def folder_with(run: Path, checkpoint: Path | None) -> Path:
    """The folder of a run's traces that begins with its first update, or where it has continued from a checkpoint.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        UsageError: the run has continued another one, and no checkpoint is given.
    """
    if checkpoint is None:
        later = [one.name for one in run.glob(f"{TRACE}-from-*")]
        if later and not folder_of(run, 0).is_dir():
            raise UsageError(
                f"run {run}",
                got=f"a run that has continued another one ({', '.join(sorted(later))})",
                expected="where it began",
                remedy="Add --from CHECKPOINT, or the run folder that it has continued.",
            )
        return folder_of(run, 0)
    own = folder_of(run, load(inside_run(checkpoint)).position.updates)
    return own if own.is_dir() else folder_of(run, 0)


def read_traces(folder: Path, stages: int) -> list[ActionTrace]:
    """The traces of all stages.

    Args:
        folder: as of :func:`folder_of`.
        stages: how many there are.

    Raises:
        UsageError: one is missing, or no trace; or they are not of one run.
    """
    found = []
    for stage in range(stages):
        path = folder / f"stage-{stage}.txt"
        try:
            if path.stat().st_size > _MOST_BYTES:
                raise _unreadable(path, f"more than {_MOST_BYTES} bytes")
            found.append(parse(path.read_text(encoding="ascii"), str(path)))
        except (OSError, ValueError) as error:
            raise _unreadable(path, reason_of(error) if isinstance(error, OSError) else "no text") from error
    for stage, trace in enumerate(found):
        own, first = trace.head, found[0].head
        same = (own.plan, own.model, own.seed, own.arithmetic, own.first, own.stages)
        if own.stage != stage or same != (first.plan, first.model, first.seed, first.arithmetic, first.first, stages):
            raise _unreadable(folder / f"stage-{stage}.txt", "the trace of another stage or run")
    return found


def _unreadable(path: Path, got: str) -> UsageError:
    return UsageError(
        f"trace {path}",
        got=got,
        expected="what a run whose order was free has written, one file for each stage",
        remedy="Give the folder of such a run, unchanged: `roundelay train JOB.py --rule ravnest` writes one.",
    )


@final
class TraceFiles:
    """Writes letters and digests into the folder of a run.

    Args:
        run: the folder.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._written: dict[Path, int] = {}

    def __call__(self, event: Event) -> None:
        """Write an event.

        Raises:
            RunError: it cannot be written.
        """
        if isinstance(event, Restarted):
            self._written = {}
        if isinstance(event, Traced):
            path = folder_of(self._run, event.head.first[1]) / f"stage-{event.head.stage}.txt"
            try:
                self._write(path, event)
            except OSError as error:
                raise RunError(
                    f"trace {path}",
                    got=reason_of(error),
                    expected="a file to write to: without it the run cannot be proved",
                    remedy="Free some space, or correct the permissions.",
                ) from error

    def _write(self, path: Path, event: Traced) -> None:
        before = self._written.get(path, 0)
        text = lines_of(event.letters, event.digests, before)
        after = before + len(event.letters)
        text += end_line(after) if event.ended else ""
        if path in self._written:
            with path.open("a", encoding="ascii") as file:
                file.write(text)
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(str(event.head) + text, encoding="ascii")
        self._written[path] = after
