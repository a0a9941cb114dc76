"""A stand-in accelerator with one device, as autograd's engine sees one: what a GPU, or torch's CUDA build, makes of a
process. As a program, what is tried beside it:

    python -m tests.runtime.stand_in early|late|never RECIPE

``early``: it is there before anything else (a machine with a GPU); ``late``: it comes with the first ``torch.export``
(the CUDA build on a machine without one, whose exporter registers a stand-in of its own); ``never``: this build of
torch as it is, which may be that one. Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

TRANSPORTS = ("shm", "gloo")


class Guard(torch._C._acc.DeviceGuard):
    """What the engine asks: how many devices there are."""

    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1  # type: ignore[attr-defined]

    def device_count(self) -> int:
        return 1

    def deviceCount(self) -> int:
        return 1


def register() -> None:
    """The accelerator is there from now on."""
    _setup_privateuseone_for_python_backend("toy", device_guard=Guard())


def register_with_export() -> None:
    """The accelerator is there behind the first export."""
    real = torch.export.export

    def export(*args: Any, **kwargs: Any) -> Any:
        made = real(*args, **kwargs)
        torch.export.export = real
        register()
        return made

    torch.export.export = export


def every_rule() -> dict[str, Any]:
    """Every rule over every transport whose processes are forked, all in one process."""
    return rules(TRANSPORTS) | rules(TRANSPORTS[::-1])


def rules(transports: Sequence[str] = TRANSPORTS) -> dict[str, Any]:
    """Every rule, over these transports by turns, all in one process."""
    import roundelay
    from roundelay.errors import PlanWarning
    from roundelay.ir.rule import rules as known
    from tests.api.jobs import make, mlp

    warnings.simplefilter("ignore", PlanWarning)  # the model has a BatchNorm
    found = {}
    for number, rule in enumerate(known()):
        transport = transports[number % 2]
        plan = roundelay.plan(make(mlp()), workers=2, rule=rule.name, transport=transport)
        found[f"{rule.name} over {transport}"] = roundelay.verify(make(mlp()), plan=plan, steps=3).equal
    return found


def around() -> dict[str, Any]:
    """What else forks or computes gradients: the baseline, an evaluation, a compiled run, a run that goes on."""
    import roundelay
    from roundelay.proof.plain_baseline import measure
    from tests.api.jobs import make, mlp

    found: dict[str, Any] = {"plain PyTorch": measure(make(mlp()), 0, 1) is not None}
    with tempfile.TemporaryDirectory() as folder:
        plan = roundelay.plan(make(mlp()), workers=2, rule="pipeoptim", transport="shm")
        trained = roundelay.train(make(mlp()), plan=plan, steps=4, save_to=Path(folder) / "a", checkpoint_every=2)
        found["updates"] = len(trained.updates)
        found["goes on"] = roundelay.verify(make(mlp()), plan=plan, steps=2, resume=Path(folder) / "a").equal
    return found


def compiled() -> dict[str, Any]:
    """A compiled run, whose workers compile for themselves where this process must not."""
    import roundelay
    from tests.api.jobs import make, mlp

    plan = roundelay.plan(make(mlp()), workers=2, rule="1f1b", transport="shm", compile=True)
    result = roundelay.verify(make(mlp()), plan=plan, steps=3)
    return {"equal": result.equal, "difference": result.difference}


def own_backward() -> dict[str, Any]:
    """The person has trained something in this process before."""
    import roundelay
    from tests.api.jobs import make, mlp

    torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    found = {}
    for transport in (*TRANSPORTS, "memory"):
        plan = roundelay.plan(make(mlp()), workers=2, rule="1f1b", transport=transport)
        try:
            found[transport] = str(roundelay.verify(make(mlp()), plan=plan, steps=3).equal)
        except roundelay.RoundelayError as error:
            found[transport] = f"{type(error).__name__}: {error}"
    return found


RECIPES: dict[str, Callable[[], dict[str, Any]]] = {
    f.__name__: f for f in (rules, every_rule, around, compiled, own_backward)
}


if __name__ == "__main__":
    {"early": register, "late": register_with_export, "never": lambda: None}[sys.argv[1]]()
    torch.set_num_threads(1)
    made = RECIPES[sys.argv[2]]()
    sys.stdout.write(json.dumps(made) + "\n")
    sys.exit(False in made.values())
