"""The figures: nothing overlaps or is cut off, axes have units, colours are told apart by any eye, files are stable."""

import itertools
import struct
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import figures

pytest.importorskip("matplotlib", reason="matplotlib is not installed")

NAMES = list(figures.figures())
UNITS = ("bytes", "slots", "GiB", "tokens/s", "minutes", "requests", "sequences")
COLOURS = ("BLUE", "ORANGE", "GREEN", "PURPLE", "SKY", "YELLOW", "INK", "GREY", "PALE")
PALETTE = {name: getattr(figures, name) for name in COLOURS}
_DRAWN: dict[str, Any] = {}


def figure(name: str) -> Any:
    """The figure, drawn once."""
    if name not in _DRAWN:
        _DRAWN[name] = figures.figures()[name]()
        _DRAWN[name].canvas.draw()
    return _DRAWN[name]


def texts(drawn: Any) -> list[Any]:
    """Every visible piece of text."""
    from matplotlib.text import Text

    hidden = set()
    for axes in drawn.axes:
        for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            hidden |= {axis.label} if not axes.axison else set()
            for tick in axis.get_major_ticks():  # those beyond the limits are made, but not drawn
                if not axes.axison or not low <= tick.get_loc() <= high:
                    hidden |= {tick.label1, tick.label2}
    found = drawn.findobj(lambda artist: isinstance(artist, Text) and artist.get_visible())
    return [text for text in found if text.get_text().strip() and text not in hidden]


def check_text(drawn: Any) -> None:
    """AssertionError for text that is too small to print, cut off, or written over other text."""
    page = drawn.bbox.padded(1)
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts(drawn)]
    for text in texts(drawn):
        assert text.get_fontsize() >= 7, f"too small to read in print: {text.get_text()!r}"
    for text, box in boxes:
        inside = page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1
        assert inside, f"cut off: {text!r}"
    for (text, box), (other, other_box) in itertools.combinations(boxes, 2):
        assert not box.padded(-1).overlaps(other_box.padded(-1)), f"overlap: {text!r} and {other!r}"


@pytest.mark.parametrize("name", NAMES)
def test_text_is_inside_readable_and_apart(name: str) -> None:
    assert len(texts(figure(name))) > 5
    check_text(figure(name))


@pytest.mark.parametrize(
    ("at", "size", "message"),
    [((0.5, 0.5), 9, "overlap"), ((0.99, 0.1), 9, "cut off"), ((0.2, 0.1), 5, "too small to read in print")],
)
def test_bad_text_is_seen(at: tuple[float, float], size: float, message: str) -> None:
    with figures.drawing(2) as (drawn, (axis,)):
        axis.axis("off")
        drawn.text(0.5, 0.5, "in the middle")
        drawn.text(*at, "somewhere else", fontsize=size)
        drawn.canvas.draw()
    with pytest.raises(AssertionError, match=message):
        check_text(drawn)


@pytest.mark.parametrize("name", NAMES)
def test_axes_have_labels_with_units(name: str) -> None:
    for axes in figure(name).axes:
        if axes.axison:
            bottom = axes.get_subplotspec().is_last_row()
            left = axes.get_subplotspec().is_first_col()
            numbers = [text.get_text() for text in axes.get_yticklabels() if text.get_text().isdigit()]
            if bottom:
                assert any(unit in axes.get_xlabel() or unit in axes.get_title() for unit in UNITS), axes.get_xlabel()
            if left and numbers:
                assert any(unit in axes.get_ylabel() for unit in UNITS), axes.get_ylabel()


@pytest.mark.parametrize("name", NAMES)
def test_only_the_palette_is_used(name: str) -> None:
    from matplotlib.colors import to_hex
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle

    allowed = {color.lower() for color in PALETTE.values()} | {"#ffffff", "#000000"}
    for axes in figure(name).axes:
        for artist in axes.findobj(lambda artist: isinstance(artist, Rectangle | Line2D)):
            if artist is axes.patch or not artist.get_visible():
                continue
            color = artist.get_facecolor() if isinstance(artist, Rectangle) else artist.get_color()
            assert to_hex(color).lower() in allowed, color


# Machado, Oliveira and Fernandes (2009), severity 1.0, on linear RGB.
VISION = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}


def lab(color: str, vision: str) -> Any:
    """CIE L*a*b* of a colour as an eye of this kind sees it."""
    rgb = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(VISION[vision] @ linear, 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ linear
    scaled = xyz / np.array([0.95047, 1.0, 1.08883])
    f = np.where(scaled > 0.008856, np.cbrt(scaled), 7.787 * scaled + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("vision", VISION)
def test_colours_that_mean_something_are_told_apart(vision: str) -> None:
    """A distance of 10 in L*a*b* is seen at a glance (2.3 is just noticed)."""
    meaning = [PALETTE[name] for name in ("BLUE", "ORANGE", "GREEN", "PURPLE", "PALE")]
    for first, second in itertools.combinations(meaning, 2):
        distance = float(np.linalg.norm(lab(first, vision) - lab(second, vision)))
        assert distance > 10, f"{first} and {second} look alike: {distance:.1f}"


@pytest.mark.parametrize("name", ["block_tables"])
def test_files_are_the_same_every_time(name: str, tmp_path: Path) -> None:
    once = figures.save(figures.figures()[name](), tmp_path / "once")
    again = figures.save(figures.figures()[name](), tmp_path / "again")
    for first, second in zip(once, again, strict=True):
        assert first.read_bytes() == second.read_bytes()
    assert ET.parse(once[0]).getroot().tag.endswith("svg")


@pytest.mark.parametrize("name", NAMES)
def test_the_documentation_has_the_figure(name: str) -> None:
    assert ET.parse(figures.FIGURES / f"{name}.svg").getroot().tag.endswith("svg")
    header = (figures.FIGURES / f"{name}.png").read_bytes()[:24]
    width, height = struct.unpack(">II", header[16:24])
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert width == figures.WIDTH * 200
    assert height > 300


def test_the_command_draws_what_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "few.csv"
    rows = (f"{i},{100 + i},{5 + i}" for i in range(20))
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows))
    out = tmp_path / "out"
    options = ["--out", str(out), "--trace", str(trace), "--only", "memory_over_time_few"]
    assert figures.main(options) == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "memory_over_time_few.png",
        "memory_over_time_few.svg",
    ]
    with pytest.raises(SystemExit):
        figures.main(["--only", "nothing"])
    assert "--only must be one of bytes_per_number" in capsys.readouterr().err
