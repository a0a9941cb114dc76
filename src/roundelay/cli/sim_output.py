"""Results of ``simulate`` and ``verify``, as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from roundelay.cli.screen import stdout, table
from roundelay.ir.num_bytes import bytes_text
from roundelay.ir.plan import Plan
from roundelay.proof.run_vs_reference import Verification
from roundelay.simulator import Simulation

_COLUMNS = """
in flight: forwards waiting for their backward; tapes: bytes they hold, and what deferred weight gradients need;
messages: on the way or unread; crossed: updates between a forward's weights and its batch;
versions: of the weights, alive at one time"""


def simulation_json(plan: Plan, simulation: Simulation) -> dict[str, Any]:
    """A simulation as one JSON object."""
    return {
        "rule": plan.rule,
        "workers": plan.num_workers,
        "makespan_s": simulation.makespan_s,
        "bubble": simulation.bubble,
        "per_worker": [
            {
                "busy_share": report.busy_s / simulation.makespan_s if simulation.makespan_s else 0.0,
                "data_share": report.data_s / simulation.makespan_s if simulation.makespan_s else 0.0,
                "in_flight_peak": report.tapes_peak,
                "activation_bytes_peak": report.tape_bytes_peak,
                "parameter_bytes": report.weight_bytes_peak,
                "updates_crossed": list(report.versions_read),
                "versions_held_peak": report.versions_held_peak,
                "messages_in_flight_bytes_peak": report.unread_bytes_peak,
                "messages_peak": {str(c): n for c, n in report.unread_peak.items()},
            }
            for report in simulation.workers
        ],
    }


def show_simulation(plan: Plan, simulation: Simulation, batches: int) -> None:
    """Print a simulation as a table."""
    rows = [
        [
            f"worker {k}",
            _share(report.busy_s, simulation),
            str(report.tapes_peak),
            bytes_text(report.tape_bytes_peak),
            bytes_text(report.unread_bytes_peak),
            bytes_text(report.weight_bytes_peak),
            f"{report.versions_read[0]}..{report.versions_read[1]}",
            str(report.versions_held_peak),
        ]
        for k, report in enumerate(simulation.workers)
    ]
    title = (
        f"{plan.rule}, {plan.arrangement}, {batches} batches of {plan.micro_batches}: "
        f"makespan {simulation.makespan_s * 1e3:.2f} ms, bubble {simulation.bubble:.0%}"
    )
    columns = ["", "busy", "in flight", "tapes", "messages", "weights", "crossed", "versions"]
    stdout.print(table(title, columns, rows))
    stdout.print(_COLUMNS)
    for k, report in enumerate(simulation.workers):
        loading_s = sum(load.end_s - load.start_s for load in simulation.loads if load.worker == k)
        if loading_s:
            waiting, loading = _share(report.data_s, simulation), _share(loading_s, simulation)
            stdout.print(f"\nworker {k} waits for data for {waiting} of the time; its reader loads for {loading} of it")


def _share(part_s: float, simulation: Simulation) -> str:
    return f"{part_s / simulation.makespan_s:.0%}" if simulation.makespan_s else "-"


def verification_json(plan: Plan, result: Verification) -> dict[str, Any]:
    """A verification as one JSON object."""
    return {
        "equal": result.equal,
        "tensors": result.tensors,
        "losses": result.losses,
        "steps": result.steps,
        "difference": result.differences(),
        "nondeterministic": result.nondeterministic,
        "proved": result.exit_code == 0,
        "fidelity": None if result.fidelity is None else asdict(result.fidelity) | {"told": str(result.fidelity)},
        "stage": result.stage,
        "rule": plan.rule,
        "transport": plan.transport,
        "reference": {"pid": result.reference_pid, "bytes_received": 0},
        "letters": result.letters,
        "digests": result.digests,
        "digests_that_differ": result.odd_digests,
        "workers": [_worker(k, data) for k, data in sorted(result.workers.items())],
    }


def _worker(number: int, data: dict[str, Any]) -> dict[str, Any]:
    received = sum(data["bytes_received"].values())
    process = {"pid": data["pid"], "thread": data["thread"], "threads": data["threads"]}
    return {"worker": number, **process, "bytes_received": received}


def replay_line(letters: int, digests: int, differing: int, *, equal: bool) -> str:
    """What the replay of a free order has found."""
    found = "trace = replay: bit-equal" if equal else "trace != replay"
    return f"{found}: {letters:,} letters, {differing} of {digests} digests differ"


def show_verification(plan: Plan, result: Verification) -> None:
    """Print a verification as a table and a few lines."""
    sides = [
        [f"worker {w['worker']}", *(str(w[column]) for column in ("pid", "thread", "threads", "bytes_received"))]
        for w in verification_json(plan, result)["workers"]
    ]
    sides.append(["reference", str(result.reference_pid), "-", "the same", "0"])
    title = f"{plan.rule} on {plan.arrangement} over {plan.transport}, compared with the one-process reference"
    stdout.print(table(title, ["", "process", "thread", "intra-op threads", "bytes received"], sides))
    stdout.print()
    if result.fidelity is not None:
        stdout.print(str(result.fidelity), markup=False)
        if result.fidelity.mesh:
            stdout.print(f"mesh = no mesh: equal but for rounding: {result.fidelity.mesh}", markup=False)
    if result.letters:
        line = replay_line(result.letters, result.digests, result.odd_digests, equal=not result.difference)
        stdout.print(line, markup=False)
    compared = f"{result.tensors} tensors, {result.steps} steps ({result.losses} losses)"
    odd = result.nondeterministic
    if not result.difference:
        stdout.print(f"run = reference: bit-equal: {compared}{f'; although {odd}' if odd else ''}", markup=False)
    elif odd:
        text = f"run = reference: cannot be compared: {odd}. First difference: {result.difference}"
        stdout.print(text, markup=False)
    else:
        stdout.print(f"run DIFFERENT from reference after {result.steps} steps: {result.difference}", markup=False)
