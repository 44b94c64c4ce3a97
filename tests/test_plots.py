"""What the pictures show, asserted on what was drawn: bars, points and labels, never pixels."""

from __future__ import annotations

import importlib
from fractions import Fraction
from pathlib import Path

import matplotlib as mpl
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from emulator.simulation import simulate
from emulator.spec.cluster import llama3_24k
from emulator.spec.device import DEVICES
from plots import (
    accuracy,
    bandwidth_hierarchy,
    bubble,
    data_parallelism,
    device_throughput,
    four_axes,
    fsdp_steady_state,
    gantt,
    gpipe,
    style,
)
from plots.__main__ import NAMES, main
from plots.gantt import Bar

FOLDER = Path(__file__).parents[1] / "plots"


def bars_of(ax: Axes, row: int) -> list[Rectangle]:
    """Bars of a row from left to right; shaded gaps are not among them."""
    found = [p for p in ax.patches if isinstance(p, Rectangle) and p.get_hatch() is None]
    return sorted((p for p in found if round(p.get_y() + p.get_height() / 2) == row), key=lambda p: p.get_x())


def gaps_of(ax: Axes) -> list[Rectangle]:
    return [p for p in ax.patches if isinstance(p, Rectangle) and p.get_hatch() is not None]


def ends(bar: Rectangle) -> tuple[float, float]:
    return bar.get_x(), bar.get_x() + bar.get_width()


def words(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts if text.get_text()]


# Every picture


@pytest.fixture(scope="module")
def drawn() -> dict[str, Figure]:
    quick = {"accuracy": {"points": [accuracy.point(row) for row in accuracy.sample()[::4]]}}
    return {name: importlib.import_module(f"plots.{name}").draw(**quick.get(name, {})) for name in NAMES}


def test_every_module_that_draws_is_rebuilt_by_make_plots():
    modules = {path.stem for path in FOLDER.glob("*.py") if "\ndef draw(" in path.read_text(encoding="utf-8")}
    assert modules == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_texts_are_large_enough_and_nothing_is_clipped(drawn: dict[str, Figure], name: str):
    """Every visible text has at least 9 points and lies within the figure."""
    fig = drawn[name]
    fig.draw_without_rendering()
    assert all(text.get_fontsize() >= 9 for text in fig.findobj(Text) if text.get_text())
    needed, width, height = fig.get_tightbbox(), *fig.get_size_inches()
    assert needed.x0 > -0.01
    assert needed.y0 > -0.01
    assert needed.x1 < width + 0.01
    assert needed.y1 < height + 0.01


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_image_is_small_and_whole(name: str):
    path = style.IMAGES / f"{name}.png"
    assert path.stat().st_size < 200_000
    assert imread(path).ndim == 3


def test_drawing_leaves_the_settings_of_matplotlib_alone():
    before = dict(mpl.rcParams)
    four_axes.draw()
    assert dict(mpl.rcParams) == before


def test_the_same_picture_is_the_same_file(tmp_path: Path):
    one, two = (style.save(four_axes.draw(), name, tmp_path) for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()


def test_pictures_by_name_are_saved_and_an_unknown_name_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(style, "save", lambda _, name: tmp_path / name)
    assert main(["four_axes"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "four_axes")
    assert main(["nonesuch"]) == 2
    assert "nonesuch" in capsys.readouterr().err


# From the catalogue


def test_throughput_has_the_notes_factors_and_the_dense_ones():
    matrix, vector = device_throughput.series()
    assert matrix.notes_factor == pytest.approx(1000)
    assert vector.notes_factor == pytest.approx(16.66, abs=0.01)
    assert matrix.dense_factor == pytest.approx(2250 / 5.05)
    assert vector.dense_factor == pytest.approx(80 / 5.05)
    tera = [value / 1e12 for value in matrix.notes]
    assert tera == pytest.approx([5, 10.6, 125, 312, 989.4, 5000])
    assert [value / 1e12 for value in vector.notes] == pytest.approx([5, 10.6, 15.7, 19.5, 67, 83.3])


def test_throughput_shows_dense_and_notes(drawn: dict[str, Figure]):
    (ax,) = drawn["device_throughput"].axes
    heights = [list(line.get_ydata()) for line in ax.lines]
    matrix, vector = device_throughput.series()
    for index, values in enumerate((matrix.dense, matrix.notes, vector.dense, vector.notes)):
        assert heights[index] == pytest.approx([value / 1e12 for value in values])
    text = " ".join(words(ax))
    assert "×1,000" in text
    assert "×17" in text


def test_hierarchy_is_the_clusters_and_falls_as_memory_grows(drawn: dict[str, Figure]):
    levels = bandwidth_hierarchy.levels(llama3_24k())
    rates = [level.bytes_per_second / 1e9 for level in levels]
    assert rates == pytest.approx([3350, 450, 50, 50 / 7])
    assert [level.notes_bytes_per_second / 1e9 for level in levels] == pytest.approx([3352, 900, 50, 50 / 7])
    assert [level.reach_gpus for level in levels] == [1, 8, 3072, 24_576]
    assert levels[-1].reach_bytes == 1.875 * 2**50
    (ax,) = drawn["bandwidth_hierarchy"].axes
    assert [bars_of(ax, row)[0].get_width() for row in range(4)] == pytest.approx(rates)
    assert any("1.875 PiB" in word for word in words(ax))


def test_four_axes_cut_every_layer_once_and_in_half():
    for cut in four_axes.CUTS:
        volume = {0: 0.0, 1: 0.0}
        for layer in range(four_axes.LAYERS):
            for rank, box in four_axes.parts(cut, layer):
                (x0, x1), (y0, y1), (z0, z1) = box
                volume[rank] += (x1 - x0) * (y1 - y0) * (z1 - z0)
        assert volume == {0: four_axes.LAYERS / 2, 1: four_axes.LAYERS / 2}, cut.axis
    assert [cut.abbreviation for cut in four_axes.CUTS] == ["DP", "CP", "TP", "PP"]


def test_every_generation_is_in_the_catalogue_in_order_of_its_year():
    years = [DEVICES[name].year for name in device_throughput.GENERATIONS]
    assert years == sorted(years)


# From emulated runs


def test_data_parallelism_has_one_all_reduce_between_backward_and_optimizer(drawn: dict[str, Figure]):
    """Three ranks alike: forward, backward and optimizer above, one all_reduce in the gap below."""
    (ax,) = drawn["data_parallelism"].axes
    trace = simulate(data_parallelism.job).trace
    for rank in range(3):
        forward, backward, update = (ends(bar) for bar in bars_of(ax, 2 * rank))
        (reduce,) = (ends(bar) for bar in bars_of(ax, 2 * rank + 1))
        assert forward[1] <= backward[0] < backward[1] <= reduce[0] < reduce[1] <= update[0]
        assert update[1] == pytest.approx(trace.end_ps / 1e9)
    assert words(ax).count("all_reduce") == 3


def test_ddp_hides_what_none_exposes(drawn: dict[str, Figure]):
    """On one time axis: as many bars as buckets, most under backward; the step ends earlier."""
    none, ddp = drawn["ddp_overlap"].axes
    assert none.get_xlim() == ddp.get_xlim()
    assert len(bars_of(none, 1)) == 1
    # 4 layers of 7 matrices, embedding and head: each over 25 MiB, each a bucket of its own.
    assert len(bars_of(ddp, 1)) == 30
    end_of = {ax: ends(bars_of(ax, 0)[-1])[1] for ax in (none, ddp)}
    assert end_of[ddp] < end_of[none]
    backward = ends(bars_of(ddp, 0)[1])
    hidden = [bar for bar in bars_of(ddp, 1) if ends(bar)[1] <= backward[1]]
    assert len(hidden) >= 29
    assert ends(bars_of(none, 1)[0])[0] >= ends(bars_of(none, 0)[1])[1] - 1e-9
    exposed = {ax: sum(gap.get_width() for gap in gaps_of(ax)) for ax in (none, ddp)}
    assert exposed[ddp] < exposed[none] / 4


def test_fsdp_window_has_three_layers_in_play(drawn: dict[str, Figure]):
    (ax,) = drawn["fsdp_steady_state"].axes
    layer = fsdp_steady_state.MIDDLE
    trace = simulate(fsdp_steady_state.job).trace
    middle = fsdp_steady_state.compute_bar(trace, layer)
    unshard = fsdp_steady_state.communication_bar(trace, f"l{layer - 1}.unshard.B.mb0", layer - 1)
    reduce = fsdp_steady_state.communication_bar(trace, f"l{layer + 1}.reduce.mb0", layer + 1)
    for bar in (unshard, reduce):
        assert bar.start_ps < middle.end_ps
        assert bar.end_ps > middle.start_ps
    assert [bar for bar in bars_of(ax, 1) if ends(bar) == (middle.start_ps / 1e9, middle.end_ps / 1e9)]
    assert f"layer {layer}" in words(ax)
    low, high = ax.get_xlim()
    for row in range(3):
        assert all(low <= ends(bar)[0] < ends(bar)[1] <= high + 1e-9 for bar in bars_of(ax, row))


def test_gpipe_has_32_cells_and_four_sevenths_in_its_title(drawn: dict[str, Figure]):
    (ax,) = drawn["gpipe"].axes
    assert gpipe.utilisation(simulate(gpipe.job).trace) == Fraction(4, 7)
    assert "4/7" in ax.get_title(loc="left")
    for row in range(4):
        cells = bars_of(ax, row)
        assert len(cells) == 8
        assert all(cell.get_width() == 1 for cell in cells)
    assert sorted(words(ax)) == sorted([f"{phase}{mb}" for phase in "FB" for mb in range(4)] * 4)
    # Cells and shaded bubble fill the four rows of 14 s.
    assert sum(gap.get_width() for gap in gaps_of(ax)) == 4 * 14 - 32


def test_bubble_points_lie_on_the_curve():
    fig = bubble.draw(stages=(2, 4, 8), microbatches=(1, 3, 8))
    (ax,) = fig.axes
    points = [line for line in ax.lines if line.get_marker() in ("o", "s", "D")]
    for p, line in zip((2, 4, 8), points, strict=True):
        for m, value in zip(line.get_xdata(), line.get_ydata(), strict=True):
            assert value == pytest.approx(bubble.formula(p, m), abs=1e-12)
    assert bubble.emulated(4, 4) == Fraction(3, 7)


def test_clipped_bars_stay_in_the_window_and_slivers_lose_their_text():
    bars = [
        Bar(0, 10, "red", "a"),
        Bar(90, 101, "red", "b"),
        Bar(100, 150, "red", "c"),
        Bar(300, 400, "red", "d"),
    ]
    assert gantt.clip(bars, 100, 200) == [Bar(100, 101, "red", ""), Bar(100, 150, "red", "c")]
