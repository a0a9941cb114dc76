"""Schedules: the order in which every worker runs forwards, backwards and updates. One file per family.

A schedule is added by a file of this folder that registers it (and an update rule that runs on it), and a line below.
"""

from roundelay.schedules import interleaved, one_stage, zero_bubble
from roundelay.schedules.schedule import SCHEDULES, Body, Schedule, actions, register_schedule, schedule_named

__all__ = [
    "SCHEDULES",
    "Body",
    "Schedule",
    "actions",
    "interleaved",
    "one_stage",
    "register_schedule",
    "schedule_named",
    "zero_bubble",
]
