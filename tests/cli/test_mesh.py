"""A mesh as a person uses it: planned, shown, trained, continued, reported, and started by torchrun."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from roundelay.checkpoint.checkpoint import load
from tests.cli.harness import MLP, ROOT, here
from tests.cli.test_torchrun import END_S, ending, same_end, torchrun

Capture = pytest.CaptureFixture[str]
MESH = ("--tensor-parallel", 2, "--workers", 1)


def test_a_run_on_a_mesh_is_trained_checked_continued_and_reported(capsys: Capture, workplace: Path) -> None:
    said = here(capsys, "train", MLP, *MESH, "--data-parallel", 2, "--steps", 6, "--check", "full", "--out", "run")
    assert said.code == 0, said.told
    assert "captured = plain PyTorch" in said.told
    summary = json.loads((workplace / "run" / "summary.json").read_text())
    assert len(summary["shares"]) == 4
    held = [one["tape_bytes"] for one in tomllib.loads((workplace / "run" / "plan.toml").read_text())["stages"]]
    assert max(summary["activation_bytes"]) < 1.5 * max(held), "a forward in parts holds one tape"
    for shares in summary["shares"]:
        busy = shares["busy"] + shares["data"] + (shares["bubble"] or 0.0) + (shares["wait"] or 0.0)
        assert busy == pytest.approx(1.0, abs=0.01)
    said = here(capsys, "train", MLP, "--from", "run", "--steps", 3, "--out", "more")
    assert said.code == 0, said.told
    assert here(capsys, "report", "run").code == 0
    events = json.loads((workplace / "run" / "trace.json").read_text())["traceEvents"]
    assert {event["args"]["of"] for event in events if event.get("cat") == "box" and "of" in event["args"]}
    assert load(workplace / "more" / "checkpoint").position.updates == 9


def test_the_physical_graph_names_every_boxing_with_its_bytes(capsys: Capture, workplace: Path) -> None:
    said = here(capsys, "plan", MLP, *MESH, "--show", "graph", "-o", "plan.toml")
    assert said.code == 0, said.told
    plan = tomllib.loads((workplace / "plan.toml").read_text())
    assert plan["mesh"] == {"tensor": 2}
    boxed = [exchange for exchange in plan["exchanges"] if exchange["kind"] == "boxed"]
    assert boxed
    for exchange in boxed:
        assert f"{exchange['value']}: P>B of {exchange['value'].removesuffix('_box')}, " in said.out
    assert "P: the sum of what workers have" in said.out, "the words are explained"
    assert "gradients of weights" in said.out
    grid = here(capsys, "simulate", "plan.toml", "--grid", "--batches", 2).out
    (row,) = [line for line in grid.splitlines() if line.startswith("stage 0 |")]
    assert row.split()[3:] == ["F0", "B0'", "F1", "B1'"], "parts of a forward are one"


def test_the_physical_graph_says_what_is_left_whole_and_why(capsys: Capture) -> None:
    said = here(capsys, "plan", MLP, *MESH, "--show", "graph")
    assert "left whole: 0.weight: by columns: no signature of aten.batch_norm.default in 2 splits it; " in said.out
    shown = json.loads(here(capsys, "plan", MLP, *MESH, "--show", "graph", "--json").out)
    assert shown["left_whole"]["8.weight"].startswith(
        "by columns: nothing sums over what aten.linear.default in 8 makes"
    )
    assert set(shown["left_whole"]) == {"0.weight", "8.weight"}
    (boxing,) = shown["boxings"]
    assert (boxing["value"], boxing["from"], boxing["to"], boxing["axis"]) == ("linear_2", "P", "B", "tensor")
    assert (boxing["when"], boxing["bytes"]) == ("after segment 0 in each forward", 512)
    assert boxing["by"] == "reduce-scatter(0),all-gather(0)"


def test_the_physical_graph_says_when_weights_are_gathered_and_gradients_scattered(capsys: Capture) -> None:
    zero = ("--workers", 1, "--data-parallel", 2, "--zero", 3)
    said = here(capsys, "plan", MLP, *zero, "--show", "graph")
    assert said.code == 0, said.told
    for line in ("before each forward, weights S>B: ", "before each backward, weights S>B: "):
        assert f"    {line}" in said.out
    assert "    after each backward, gradients of weights P>S: " in said.out
    assert said.out.startswith("S(1): split along dimension 1;")
    assert "at the batch's end, the number of terms that losses have summed: 8 bytes" in said.out
    assert "stored whole" not in said.out
    said = here(capsys, "plan", MLP, "--workers", 1, "--data-parallel", 6, "--zero", 3, "--show", "graph")
    assert "stored whole: 8.bias: no dimension is as long as the 6 replicas" in said.out


def test_two_launched_processes_are_a_mesh(capsys: Capture, workplace: Path) -> None:
    plan = workplace / "plan.toml"
    assert here(capsys, "plan", MLP, *MESH, "--transport", "gloo", "-o", plan).code == 0
    run = ("--steps", 20, "--no-baseline", "--plan", plan)
    process = torchrun(workplace, ["--standalone", "--nproc-per-node", "2"], MLP, *run, "--out", "launched")
    with ending(process):
        out, _ = process.communicate(timeout=END_S)
    assert process.returncode == 0, out
    assert here(capsys, "train", MLP, *run, "--out", workplace / "alone").code == 0
    same_end(workplace / "launched", workplace / "alone")


def test_signatures_from_a_file_are_planned_kept_and_continued(capsys: Capture, workplace: Path) -> None:
    own = 'mesh = { tensor = 2 }\n[parameters]\n"0.weight" = [["tensor", "S(0)"]]\n'
    own += '[outputs]\n"0" = [["tensor", "S(1)"]]\n'
    (workplace / "own.toml").write_text(own)
    said = here(capsys, "train", MLP, "--signatures", "own.toml", "--workers", 1, "--steps", 2, "--out", "run")
    assert said.code == 0, said.told
    plan = tomllib.loads((workplace / "run" / "plan.toml").read_text())
    assert (plan["parameters"], plan["outputs"]) == (tomllib.loads(own)["parameters"], tomllib.loads(own)["outputs"])
    said = here(capsys, "train", MLP, "--from", "run", "--micro-batches", 2, "--steps", 2, "--out", "more")
    assert said.code == 0, said.told
    again = tomllib.loads((workplace / "more" / "plan.toml").read_text())
    assert again["micro_batches"] != plan["micro_batches"]
    assert (again["parameters"], again["outputs"]) == (plan["parameters"], plan["outputs"])
    said = here(capsys, "plan", MLP, "--signatures", "run/plan.toml", "--workers", 1, "-o", "same.toml")
    assert said.code == 0, said.told
    assert tomllib.loads((workplace / "same.toml").read_text())["outputs"] == plan["outputs"]
    (workplace / "three.toml").write_text(own.replace("tensor = 2", "tensor = 3"))
    said = here(capsys, "train", MLP, "--from", "run", "--signatures", "three.toml", "--steps", 1, "--out", "three")
    assert said.code == 0, said.told
    verify = ("verify", MLP, "--plan", "run/plan.toml", "--steps", 2, "--signatures")
    assert here(capsys, *verify, "own.toml").code == 0
    (workplace / "other.toml").write_text(own.replace("S(1)", "B"))
    told = here(capsys, *verify, "other.toml").told
    assert "--signatures with --plan" in told
    assert "expected a file with mesh = { tensor = 2 }, [parameters] and [outputs], as in the plan" in told


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mesh = {", "the signatures"),
        ("[parameters]", "no `mesh`"),
        ("mesh = { tensor = 2 }\nparametres = {}", "the field 'parametres'"),
        ("mesh = { tensor = 0 }", "`int` >= 1"),
        ('mesh = { tensor = 2 }\nparameters = { "0.weight" = "S(0)" }', "Expected `array`"),
        ("mesh = { a = 2, b = 2 }", "one axis: several are not carried out yet"),
    ],
)
def test_a_file_of_signatures_that_cannot_be_read_is_refused(
    text: str, message: str, capsys: Capture, workplace: Path
) -> None:
    (workplace / "own.toml").write_text(text)
    said = here(capsys, "plan", MLP, "--signatures", "own.toml")
    assert said.code == 2, said.told
    assert message in said.told
    assert "Traceback" not in said.told


def test_signatures_in_place_of_tensor_parallel(capsys: Capture, workplace: Path) -> None:
    (workplace / "own.toml").write_text("mesh = { tensor = 2 }")
    said = here(capsys, "plan", MLP, "--signatures", "own.toml", *MESH)
    assert said.code == 2
    assert "--signatures with --tensor-parallel" in said.told
    assert "the file of signatures nowhere.toml" in here(capsys, "plan", MLP, "--signatures", "nowhere.toml").told


def test_the_physical_graph_of_face_recognition(capsys: Capture) -> None:
    """OneFlow's Fig. 12: features are gathered, and of the softmax only what each row needs."""
    job, own = ROOT / "examples" / "face_recognition.py", ROOT / "examples" / "face_recognition.toml"
    said = here(capsys, "plan", job, "--signatures", own, "--micro-batches", 2, "--show", "graph")
    assert said.code == 0, said.told
    graph = said.out[said.out.index("stage 0 on workers") :].splitlines()
    assert graph == (Path(__file__).parent / "face_recognition_graph.txt").read_text().splitlines()


def test_a_plan_that_needs_more_memory_than_a_limit_is_refused(capsys: Capture, workplace: Path) -> None:
    """As OneFlow's Fig. 2 asks: before anything runs, and with what takes the memory."""
    plan = ("plan", MLP, "--workers", 1, "--rule", "1f1b")
    said = here(capsys, *plan, "--memory-limit", "1KiB", "-o", "no.toml")
    assert said.code == 2, said.told
    for words in ("memory of worker 0, which runs stage 0", "weights ", "gradients ", "tapes ", "at most 1.0 KiB"):
        assert words in said.told
    assert not (workplace / "no.toml").exists()
    assert here(capsys, *plan, "--memory-limit", "1 GiB", "-o", "plan.toml").code == 0
    verify = ("verify", MLP, "--plan", "plan.toml", "--steps", 1, "--memory-limit")
    assert "memory of worker 0" in here(capsys, *verify, "100").told
    assert here(capsys, *verify, "2gib").code == 0
    assert here(capsys, *verify, "9" * 400).code == 0
    assert "--memory-limit got 'much'" in here(capsys, *plan, "--memory-limit", "much").told


def test_what_is_split_fits_where_the_whole_does_not(capsys: Capture, workplace: Path) -> None:
    def held(*options: object) -> float:
        said = here(capsys, "plan", MLP, "--workers", 1, "--rule", "1f1b", "--memory-limit", 1, *options).told
        found = re.search(r"got ([\d.]+) KiB \(weights", said)
        assert found is not None, said
        return float(found[1])

    assert held("--tensor-parallel", 2) < 0.9 * held()
