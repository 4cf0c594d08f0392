"""`nox -s figures`: draw the pictures of the documentation from the computations they show.

    nox -s figures -- [--trace FILE] [--out docs/figures] [--only NAME]

writes each as SVG and PNG. matplotlib is imported where it is used: only this command needs it, and asv imports every
module of this folder.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs" / "figures"

# Okabe and Ito's colours, told apart with any colour vision; hatches tell the same in black and white.
BLUE, ORANGE, GREEN, PURPLE, SKY, YELLOW = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442"
INK, GREY, PALE = "#222222", "#8A8A8A", "#E6E6E6"
WASTE_HATCH = "////"
STYLE = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same picture on every machine
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.labelcolor": INK,
    "text.color": INK,
    "hatch.linewidth": 0.6,
    "hatch.color": GREY,
    "legend.frameon": False,
    "savefig.facecolor": "white",
    "svg.hashsalt": "pagebench",  # ids in the SVG would differ from run to run
    "svg.fonttype": "path",
}
WIDTH = 6.5  # inches: the text width of a page


@contextmanager
def drawing(height: float, columns: int = 1, **options: object) -> Iterator[tuple["Figure", list]]:  # type: ignore[type-arg]  # of Axes
    """(a figure of the page's width, its axes) in the common style."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):  # type: ignore[arg-type]  # a plain dictionary of its keys
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(1, columns, squeeze=False, **options)  # type: ignore[call-overload]  # passed on
        yield figure, list(axes[0])


def save(figure: "Figure", path: Path) -> list[Path]:
    """Write `path`.svg and `path`.png; the same figure gives the same bytes."""
    import matplotlib as mpl

    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):  # type: ignore[arg-type]  # a plain dictionary of its keys
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None, "Creator": None})
        figure.savefig(path.with_suffix(".png"), dpi=200, metadata={"Software": None})
    return [path.with_suffix(".svg"), path.with_suffix(".png")]


def figures(trace: Path | None = None) -> dict[str, Callable[[], "Figure"]]:
    """All figures by file name. `trace`: what memory over time is drawn from, instead of the synthetic trace."""
    from bench import figures_batching, figures_blocks, figures_serving

    name = "memory_over_time" + (f"_{trace.stem}" if trace is not None else "")
    return {
        "bytes_per_number": figures_blocks.bytes_per_number,
        "formula": figures_blocks.formula,
        "naive_waste": figures_blocks.naive_bar,
        "scattered_gaps": figures_blocks.scattered_gaps,
        "block_tables": figures_blocks.block_tables,
        "edge_cases": figures_blocks.edge_cases,
        name: lambda: figures_serving.memory_on_trace(trace),
        "tokens_per_second": figures_serving.tokens_per_second_figure,
        "batching": figures_batching.batching,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="nox -s figures --", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=FIGURES, help="folder (default docs/figures)")
    parser.add_argument("--trace", type=Path, help="draw memory over time on this trace too, into a file of its name")
    parser.add_argument("--only", action="append", metavar="NAME", help="only this figure, repeatable")
    chosen = parser.parse_args(arguments)
    drawn = figures() | (figures(chosen.trace) if chosen.trace else {})
    unknown = set(chosen.only or ()) - set(drawn)
    if unknown:
        parser.error(f"--only must be one of {', '.join(drawn)}, got {', '.join(sorted(unknown))}")
    for name in chosen.only or drawn:
        try:
            written = save(drawn[name](), chosen.out / name)
        except ValueError as error:
            parser.error(str(error))
        print("written:", *written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
