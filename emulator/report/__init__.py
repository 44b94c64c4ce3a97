"""Trace to numbers, files and pictures."""
