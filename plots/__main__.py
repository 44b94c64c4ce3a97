"""Rebuild every picture: `python -m plots`, or some by name: `python -m plots gpipe bubble`."""

from __future__ import annotations

import importlib
import sys

from plots import style

NAMES = (
    "device_throughput",
    "bandwidth_hierarchy",
    "four_axes",
    "data_parallelism",
    "ddp_overlap",
    "fsdp_steady_state",
    "gpipe",
    "bubble",
    "accuracy",
    "speed",
)


def main(names: list[str]) -> int:
    """Draw and save the pictures named, by default all; the exit status is 2 for a name there is none of."""
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        print(f"no picture {', '.join(unknown)}; there are {', '.join(NAMES)}", file=sys.stderr)
        return 2
    for name in names or NAMES:
        module = importlib.import_module(f"plots.{name}")
        print(style.save(module.draw(), name))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
