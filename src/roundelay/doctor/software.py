"""Checks of what is installed and set: each a pure function of the machine as it was read."""

from __future__ import annotations

import re

from roundelay.doctor.finding import Check, Finding, size
from roundelay.doctor.machine import Machine
from roundelay.env import KEEP, LEVELS, MALLOC, VARIABLES

PYTHON = (3, 11)
"""The oldest Python that will do; as in ``pyproject.toml``."""

TORCH = ((2, 11), (2, 14))
"""The oldest torch that will do, and the first that may not; as in ``pyproject.toml``."""

_INSTALL = 'Run: pip install "torch>={}.{},<{}.{}"'.format(*TORCH[0], *TORCH[1])


def python(machine: Machine) -> Finding:
    """Python's version."""
    found = ".".join(map(str, machine.python))
    if machine.python >= PYTHON:
        return Finding("Python", found)
    return Finding("Python", f"{found}, too old", "problem", "Use Python {}.{} or newer.".format(*PYTHON))


def torch(machine: Machine) -> Finding:
    """Torch's version."""
    version = machine.torch.version
    if version is None:
        return Finding("torch", f"cannot be loaded: {machine.torch.error}", "problem", _INSTALL)
    parts = re.match(r"(\d+)\.(\d+)", version)
    if parts and TORCH[0] <= (int(parts[1]), int(parts[2])) < TORCH[1]:
        return Finding("torch", version)
    return Finding("torch", f"{version}, which Roundelay is not made for", "problem", _INSTALL)


def commands(machine: Machine) -> Finding:
    """Whether Roundelay's own commands can be loaded."""
    if not machine.commands_error:
        return Finding("roundelay", "its commands can be loaded")
    remedy = "Install what it needs: `python -m pip check` says what is missing or does not fit."
    return Finding("roundelay", f"its commands cannot be loaded: {machine.commands_error}", "problem", remedy)


def devices(machine: Machine) -> Finding:
    """Devices that torch can compute on beside the processor."""
    found = machine.torch
    if found.version is None:
        return Finding("devices", "not known without torch", "warning", "See torch.")
    if found.devices:
        return Finding("devices", ", ".join(f"{name} ({size(memory)})" for name, memory in found.devices))
    if machine.driver:
        built = "is built without CUDA" if found.cuda is None else f"is built for CUDA {found.cuda}"
        reason = f": {found.device_error}" if found.device_error else ""
        remedy = "Install the build of torch that fits the driver: https://pytorch.org/get-started/locally/"
        return Finding("devices", f"an NVIDIA driver, but torch {built} and sees no device{reason}", "warning", remedy)
    return Finding("devices", "no CUDA device: the processor computes")


def bf16(machine: Machine) -> Finding:
    """Whether the processor computes every layer in bf16: torch hands an LSTM to oneDNN, which lacks it on some."""
    found = machine.torch
    if found.version is None:
        return Finding("bf16", "not known without torch", "warning", "See torch.")
    if not found.lowered_error:
        return Finding("bf16", "computed by the processor, LSTMs too")
    remedy = "For a model with an LSTM leave `--precision` out, or cast its input by hand."
    return Finding("bf16", f"no kernel for an LSTM of fp32 values: {found.lowered_error}", "warning", remedy)


def backends(machine: Machine) -> Finding:
    """What processes can talk over."""
    found = machine.torch
    remedy = "Install torch from PyPI or pytorch.org; `--transport gloo` and torchrun need it."
    if found.version is None:
        return Finding("backends", "not known without torch", "warning", "See torch.")
    if not found.distributed:
        return Finding("backends", "this build of torch has no torch.distributed", "problem", remedy)
    if not found.gloo:
        return Finding("backends", "torch.distributed without gloo", "problem", remedy)
    if found.devices and not found.nccl:
        remedy = "Install a build of torch with NCCL, or let the devices' workers talk over gloo."
        return Finding("backends", "gloo, but no NCCL between the CUDA devices", "warning", remedy)
    return Finding("backends", "gloo, NCCL" if found.nccl else "gloo; no NCCL, which only CUDA devices need")


def malloc(machine: Machine) -> Finding:
    """What the C library does with memory that is freed."""
    name, given = "malloc", {key: value for key, value in machine.settings.items() if key in MALLOC}
    if machine.glibc is None:
        return Finding(name, "not glibc: its own settings")
    if given == MALLOC:
        return Finding(name, f"{machine.glibc}, keeps freed memory for the next micro-batch")
    if given:
        return Finding(name, "as you have set it: " + ", ".join(f"{key}={value}" for key, value in given.items()))
    if machine.settings.get("ROUNDELAY_MALLOC") == "keep":
        return Finding(name, f"{machine.glibc} as it is, since ROUNDELAY_MALLOC=keep")
    remedy = "Start by the command `roundelay`, which sets them, rather than from a program of your own."
    return Finding(name, f"{machine.glibc} as it is: micro-batches ask the system for memory again", "warning", remedy)


def compiler(machine: Machine) -> Finding:
    """A C++ compiler, which torch.compile calls."""
    if machine.compiler is not None:
        return Finding("C++ compiler", machine.compiler)
    return Finding("C++ compiler", "none: compiled stages would not work", "warning", "Install g++ or clang++.")


def tensorboard(machine: Machine) -> Finding:
    """The optional TensorBoard."""
    version = machine.packages.get("tensorboard")
    if version is not None:
        return Finding("tensorboard", version)
    return Finding("tensorboard", "not installed; only `--tensorboard` needs it", "ok", "pip install tensorboard")


def transformers(machine: Machine) -> Finding:
    """The optional transformers."""
    version = machine.packages.get("transformers")
    if version is not None:
        return Finding("transformers", version)
    return Finding("transformers", "not installed; only jobs with its models need it", "ok", "pip install transformers")


def launcher(machine: Machine) -> Finding:
    """How this process was started."""
    place = machine.launched
    if machine.launch_error is not None:
        got, remedy = machine.launch_error
        return Finding("launcher", got, "problem", remedy)
    if place is None:
        return Finding("launcher", "none: started by hand")
    return Finding("launcher", f"{place.launcher}: worker {place.rank} of {place.size}, hosts: {place.nodes}")


def interface(machine: Machine) -> Finding:
    """The network interface for several hosts."""
    name, given = "network", machine.settings.get("GLOO_SOCKET_IFNAME")
    if given is None:
        return Finding(name, "GLOO_SOCKET_IFNAME is not set: nothing listens outside loopback")
    if given in machine.interfaces:
        return Finding(name, f"GLOO_SOCKET_IFNAME={given}: under torchrun, workers listen there")
    known = ", ".join(machine.interfaces) or "none"
    remedy = "Set it to one of these, or unset it if all workers are on this host."
    return Finding(name, f"GLOO_SOCKET_IFNAME={given}, but the interfaces are: {known}", "problem", remedy)


def variables(machine: Machine) -> Finding:
    """Roundelay's own environment variables."""
    given = {key: value for key, value in machine.settings.items() if key.startswith("ROUNDELAY_")}
    if not given:
        return Finding("variables", "none of Roundelay's is set")
    unknown = [key for key in given if key not in VARIABLES]
    found = "; ".join(f"{key}={value}: {VARIABLES.get(key, 'unknown, without effect')}" for key, value in given.items())
    if given.get("ROUNDELAY_DEBUG", "0") not in LEVELS:
        return Finding(
            "variables", found, "problem", f"Set ROUNDELAY_DEBUG to one of {', '.join(LEVELS)}, or unset it."
        )
    if (given.get("ROUNDELAY_MALLOC") or KEEP) != KEEP:
        return Finding("variables", found, "problem", f"Set ROUNDELAY_MALLOC to {KEEP}, or unset it.")
    if unknown:
        return Finding("variables", found, "warning", f"Unset {', '.join(unknown)}; known: {', '.join(VARIABLES)}.")
    return Finding("variables", found)


SOFTWARE: tuple[Check, ...] = (
    python,
    torch,
    commands,
    devices,
    bf16,
    backends,
    malloc,
    compiler,
    tensorboard,
    transformers,
    launcher,
    interface,
    variables,
)
"""The checks of what is installed and set, in the order in which they are told."""
