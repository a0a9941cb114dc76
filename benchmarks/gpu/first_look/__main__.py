"""``python -m benchmarks.gpu.first_look``: what holds on this machine, in minutes; see ../README.md."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path[:0] = [folder for folder in (str(ROOT / "src"), str(ROOT)) if folder not in sys.path]

os.environ.setdefault("ROUNDELAY_RUNS", "none")

from benchmarks.gpu.first_look.checks import CHECKS  # noqa: E402  the line above lets it be found
from benchmarks.gpu.first_look.runner import FAILS, Result, Setting, run_all  # noqa: E402


def options(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="first_look", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="for all checks together; default: 10")
    parser.add_argument("--devices", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal")
    parser.add_argument("--only", default="", metavar="REGEX", help="only checks whose names it is found in")
    parser.add_argument("--out", type=Path, help="folder for first_look.json and the logs; default: a new one")
    parser.add_argument("--size", choices=("tiny", "full"), help="default: tiny on the CPU, full on cuda")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="in place of each check's own limit")
    parser.add_argument("--through", default="", metavar="MODULE", help="runs all others: a stand-in for a device")
    parser.add_argument("--plant", default="", metavar="FAULT", help="break the product: the checks must fail")
    parser.add_argument("--list", action="store_true", help="name the checks")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Run the checks and print; the exit code."""
    asked = options(words)
    checks = [check for check in CHECKS if re.search(asked.only, check.name)]
    if not checks:
        print(f"--only {asked.only}: no check has such a name; --list names them", file=sys.stderr)
        return 2
    if asked.list:
        print("\n".join(check.name for check in checks))
        return 0
    began = time.monotonic()
    out = asked.out or Path(tempfile.mkdtemp(prefix="first_look_"))
    out.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as logs:
        setting = Setting(
            kind=asked.devices,
            tiny=(asked.size or ("tiny" if asked.devices == "cpu" else "full")) == "tiny",
            logs=Path(logs),
            until=began + 60 * asked.minutes,
            limit_s=asked.limit,
            fault=asked.plant,
            through=asked.through,
            forks=asked.devices == "cpu" and _warm(),
        )
        for result in run_all(setting, checks):
            results.append(result)
            print("\n".join(result.lines()), flush=True)
            _write(out, results, time.monotonic() - began, asked.devices)
    failed = [result.name for result in results if result.verdict == FAILS]
    counts = ", ".join(f"{count} {verdict}" for verdict, count in Counter(r.verdict for r in results).items())
    print(f"\n{counts}, in {time.monotonic() - began:.0f} s; first_look.json and first_look.log in {out}")
    if failed:
        print(f"FAILS: {', '.join(failed)}")
    return 1 if failed else 0


def _warm() -> bool:
    """Load everything that the checks need, once, if processes can be forked from this one."""
    import torch

    torch.set_num_threads(1)
    from roundelay.fork_safety import STARTED_WITHOUT_DEVICES

    if not STARTED_WITHOUT_DEVICES or not hasattr(os, "fork"):
        return False
    import roundelay
    from benchmarks.gpu.first_look import equal, measure, networks, watch

    del equal, measure, watch
    roundelay.plan(networks.made("mlp", True), workers=2, devices="cpu")
    return True


def _write(out: Path, results: Sequence[Result], seconds: float, kind: str) -> None:
    """Everything so far: figures and words as JSON, what was printed as one text."""
    about = {"python": platform.python_version(), "host": platform.platform(), "cores": os.cpu_count()}
    rows = [result.as_json() for result in results]
    (out / "first_look.log").write_text("".join(f"===== {r.name}\n{r.printed}\n" for r in results))
    (out / "first_look.json").write_text(
        json.dumps({**about, "devices": kind, "seconds": round(seconds, 1), "checks": rows}, indent=1)
    )


if __name__ == "__main__":
    sys.exit(main())
