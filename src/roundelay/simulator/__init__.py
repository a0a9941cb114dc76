"""The simulator: the runtime's own machines on a virtual clock, without threads, processes or torch."""

from roundelay.simulator.makespan import makespan_s
from roundelay.simulator.simulation import Vary, simulate
from roundelay.simulator.simulation_result import Interval, Simulation, WorkerReport

__all__ = ["Interval", "Simulation", "Vary", "WorkerReport", "makespan_s", "simulate"]
