"""``roundelay doctor``: what would fail on this machine, and the remedy.

:mod:`~roundelay.doctor.host` reads the machine into one value; :mod:`~roundelay.doctor.checks` judges that value by
pure functions, so that every check can be tested on an invented machine. Nothing here needs torch: a machine on which
it cannot be imported can be examined too.
"""

from roundelay.doctor.checks import Finding, examine
from roundelay.doctor.host import HostFacts, read_machine

__all__ = ["Finding", "HostFacts", "examine", "read_machine"]
