"""Job to Program: who does what, with no clock."""

from emulator.plan.build import plan
from emulator.plan.check import ProgramError, check

__all__ = ["ProgramError", "check", "plan"]
