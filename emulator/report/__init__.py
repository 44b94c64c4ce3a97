"""Trace to numbers, files and pictures."""

from emulator.report.metrics import Report, measure, unmeasured

__all__ = ["Report", "measure", "unmeasured"]
