"""What this machine can do, what would not work on it, and the remedy.

`probe` reads the machine into one value, `software` and `hardware` judge that value, each check a pure function, and
`finding` is what a check says. So every judgement can be tried on a pretended machine. Nothing here needs torch, nor
any other part of the house that does: a machine on which torch cannot even be loaded is examined all the same.
"""

from roundelay.doctor.finding import Finding
from roundelay.doctor.hardware import HARDWARE
from roundelay.doctor.machine import Machine
from roundelay.doctor.probe import probe
from roundelay.doctor.software import SOFTWARE

__all__ = ["Finding", "Machine", "examine", "probe"]


def examine(machine: Machine) -> tuple[Finding, ...]:
    """Every check's finding, in the order in which a person reads them."""
    return tuple(check(machine) for check in (*SOFTWARE, *HARDWARE))
