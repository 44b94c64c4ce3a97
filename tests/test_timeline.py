"""Timelines: what is drawn where, read back from the figure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from handmade import US, gpipe, job, timed, trace
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from emulator.plan.program import Collective, Fixed, Group
from emulator.report.plot import COLOURS, IDLE, MAX_ROWS, WAITING, timeline
from emulator.run import run
from emulator.run.trace import Trace

GATHER = Collective(kind="all_gather", group="dp_shard", axis="dp_shard", bytes=1000)


def sharded(ranks: int) -> Trace:
    """A gather of all ranks under the first kernel, then a kernel that waits for it."""
    ops = [
        timed("f0", Fixed(0), 0, 4 * US, phase="F"),
        timed("ag", GATHER, 0, 6 * US, stream="dp.unshard", begin=US),
        timed("f1", Fixed(0), 6 * US, 9 * US, phase="F", waits=(1,)),
    ]
    return trace(job(dp=ranks), [ops] * ranks, groups=(Group("dp_shard", tuple(range(ranks))),))


def labels(figure: Figure) -> list[str]:
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


def bars(figure: Figure) -> set[tuple[str, float, float, float]]:
    """(colour, row, from, to) of every rectangle, in the axis's unit."""
    found = set()
    for collection in figure.axes[0].collections:
        for path in collection.get_paths():
            box = path.get_extents()
            colour = to_hex(collection.get_facecolor()[0])
            found.add((colour, round((box.y0 + box.y1) / 2, 6), round(box.x0, 6), round(box.x1, 6)))
    return found


def test_a_row_per_stream_with_communication_under_compute() -> None:
    figure = timeline(sharded(2))
    assert labels(figure) == ["rank 0  compute", "dp.unshard", "rank 1  compute", "dp.unshard"]
    assert figure.axes[0].get_xlabel() == "time (us)"
    expected = {
        (COLOURS["forward"], 0.0, 0.0, 4.0),
        (COLOURS["forward"], 0.0, 6.0, 9.0),
        (IDLE, 0.0, 4.0, 6.0),
        (COLOURS[WAITING], 1.0, 0.0, 1.0),
        (COLOURS["dp"], 1.0, 1.0, 6.0),
    }
    assert {bar for bar in bars(figure) if bar[1] < 2} == expected


def test_cells_carry_microbatch_numbers_and_bubbles_are_shaded() -> None:
    figure = timeline(run(gpipe(4, 4, US, 2 * US)))
    assert labels(figure) == [f"rank {r}  compute" for r in range(4)], (
        "transfers that take no time get no row"
    )
    assert [text.get_text() for text in figure.axes[0].texts] == ["0", "1", "2", "3"] * 8
    shaded = {bar for bar in bars(figure) if bar[0] == IDLE}
    assert shaded == {
        (IDLE, 0.0, 4.0, 13.0),
        (IDLE, 1.0, 0.0, 1.0),
        (IDLE, 1.0, 5.0, 11.0),
        (IDLE, 1.0, 19.0, 21.0),
        (IDLE, 2.0, 0.0, 2.0),
        (IDLE, 2.0, 6.0, 9.0),
        (IDLE, 2.0, 17.0, 21.0),
        (IDLE, 3.0, 0.0, 3.0),
        (IDLE, 3.0, 15.0, 21.0),
    }


def test_numbers_that_do_not_fit_are_left_out() -> None:
    assert len(timeline(run(gpipe(2, 200, US, 2 * US))).axes[0].texts) == 0


def test_what_is_beyond_the_rows_is_cut_with_a_note() -> None:
    figure = timeline(sharded(40))
    assert len(labels(figure)) == MAX_ROWS
    note = figure.get_supxlabel()
    assert note == "cut: 64 of 80 rows, 32 of 40 ranks are shown"
    assert timeline(sharded(32)).get_supxlabel() == ""


def test_ranks_and_streams_can_be_chosen() -> None:
    assert labels(timeline(sharded(8), ranks=[5])) == ["rank 5  compute", "dp.unshard"]
    assert labels(timeline(sharded(2), streams=["compute"])) == ["rank 0  compute", "rank 1  compute"]


def test_the_legend_names_only_what_is_drawn() -> None:
    legend = timeline(sharded(2)).axes[0].get_legend()
    assert legend is not None
    assert [t.get_text() for t in legend.get_texts()] == [
        "forward",
        "dp communication",
        WAITING,
        "compute idle",
    ]


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_files_are_written_whole(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / "figures" / f"t.{suffix}"
    timeline(sharded(2), path)
    assert path.stat().st_size > 1000
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_drawing_leaves_pyplot_alone() -> None:
    """No global figure state, and no display needed."""
    code = "import sys, emulator.report.plot; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).parent.parent).returncode
        == 0
    )
