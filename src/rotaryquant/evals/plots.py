"""Pictures of measurements; matplotlib is imported only when one is asked for."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rotaryquant.errors import ConfigError
from rotaryquant.evals.retrieval import grid

#: Points of difference at which the colors of a grid end.
_FULL_COLOR = 10


def check_plot(path: Path) -> None:
    """Raise ConfigError where no picture can be drawn there: better before hours of work than behind them."""
    _new_figure(path, 1.0, 1.0)
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: {path.parent} is no folder")


def _new_figure(path: Path, width: float, height: float) -> Any:
    """An empty figure, inches. Raises ConfigError where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"--plot {path}: matplotlib is not installed ({error}); pip install 'rotaryquant[eval]'"
        ) from error
    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def plot_divergence(path: Path, divergence: dict[str, list[Tensor]], data: dict[str, Any]) -> None:
    """Mean KL divergence over the position in the window, one line for each configuration.

    divergence: for each configuration the chunks' values in order, windows one after another. data: the report's, whose
    `context` is the tokens in a window, of which positions from `prefix` on are scored. Raises ConfigError where
    matplotlib is not installed.
    """
    first, scored = data["prefix"], data["context"] - 1 - data["prefix"]
    figure = _new_figure(path, 7.5, 4.0)
    axes = figure.subplots()
    grain = 16
    for name, chunks in divergence.items():
        windows = torch.cat(chunks).view(-1, scored)
        usable = scored // grain * grain
        means = windows[:, :usable].reshape(len(windows), -1, grain).mean((0, 2))
        axes.plot(range(first + grain // 2, first + usable, grain), means.clamp_min(1e-9).tolist(), label=name, lw=1.3)
    axes.set_yscale("log")
    axes.set_xlabel("position in the window")
    axes.set_ylabel("KL divergence, nats")
    axes.set_title(
        f"{data['model']}: packed against 16-bit cache, {data['windows']} windows of {data['text']}", fontsize=9
    )
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def plot_grid(path: Path, data: Mapping[str, Any], row: str) -> None:
    """Three panels for each packed cache: accuracy at 16 bits, its own, and the difference with its interval.

    data: of `eval needle` or `eval ruler`. row: what the grid's rows are called. Cells that do not count are grey and
    hatched and say why; those that count and lose too much are bold. Raises ConfigError where matplotlib is not
    installed.
    """
    cells, contexts = data["results"], list(data["contexts"])
    caches, names = (list(dict.fromkeys(cell[key] for cell in cells)) for key in ("kv", "row"))
    width, height = 1.0 + 3 * max(2.1, 1.1 * len(contexts)), 1.2 + 0.52 * len(names)
    figure = _new_figure(path, width, 0.8 + len(caches) * height)
    parts = figure.subfigures(len(caches), 1, squeeze=False)[:, 0]
    for part, kv in zip(parts, caches, strict=True):
        own = {(cell["row"], cell["context"]): cell for cell in cells if cell["kv"] == kv}
        part.suptitle(f"kv={kv}", fontsize=9, fontweight="bold")
        panels = part.subplots(1, 3, sharey=True)
        for axes, (title, color, text) in zip(panels, _panels(), strict=True):
            _draw_cells(axes, own, names, contexts, color, text)
            axes.set_title(title, fontsize=8)
            axes.set_xlabel("context, tokens", fontsize=8)
        panels[0].set_ylabel("depth of the fact" if row == "depth" else row, fontsize=8)
    what, loss = "facts at depths" if row == "depth" else "tasks after RULER", _minus(f"-{100 * grid.LOSS:g}")
    figure.suptitle(
        f"{data['model']}, {data['form']} form: {what}\n"
        f"grey: does not count; bold: counts, and its interval reaches {loss} points",
        fontsize=9,
    )
    figure.savefig(path)


#: Of a panel: its title, the color of a cell, and what is written into it.
_Panel = tuple[str, Callable[[Mapping[str, Any]], Any], Callable[[Mapping[str, Any]], str]]


def _panels() -> list[_Panel]:
    from matplotlib import colormaps

    greens, signs = colormaps["YlGn"], colormaps["RdBu"]

    def accuracy(title: str, key: str) -> _Panel:
        return title, lambda cell: greens(0.65 * cell[key]), lambda cell: f"{100 * cell[key]:.1f}"

    def color(cell: Mapping[str, Any]) -> Any:
        return signs(0.5 + 0.35 * max(-1.0, min(1.0, 100 * cell["difference"] / _FULL_COLOR)))

    def difference(cell: Mapping[str, Any]) -> str:
        ends = "..".join(grid.points(cell[f"difference_{end}"]) for end in ("low", "high"))
        why = "" if cell["verdict"] == grid.COUNTS else f"\n{cell['verdict']}"
        return _minus(f"{grid.points(cell['difference'])}\n({ends})") + why

    return [
        accuracy("16-bit cache, % correct", "accuracy_16bit"),
        accuracy("packed cache, % correct", "accuracy"),
        ("packed less 16-bit, points (95%)", color, difference),
    ]


def _minus(text: str) -> str:
    return text.replace("-", "\N{MINUS SIGN}")


def _draw_cells(
    axes: Any,
    cells: Mapping[tuple[str, int], Mapping[str, Any]],
    names: list[str],
    contexts: list[int],
    color: Callable[[Mapping[str, Any]], Any],
    text: Callable[[Mapping[str, Any]], str],
) -> None:
    """Rectangles with numbers in them, the first row on top, the shortest context on the left."""
    from matplotlib.patches import Rectangle

    for y, name in enumerate(names):
        for x, context in enumerate(contexts):
            cell = cells[name, context]
            counts, fails = cell["verdict"] == grid.COUNTS, grid.fails(cell)
            axes.add_patch(
                Rectangle(
                    (x - 0.5, y - 0.5), 1, 1, facecolor=color(cell) if counts else "#e8e8e8",
                    edgecolor="white" if counts else "#cccccc", hatch=None if counts else "////", linewidth=1.0,
                )
            )  # fmt: skip
            axes.text(
                x, y, text(cell), ha="center", va="center", fontsize=7, linespacing=1.15,
                color="black" if counts else "#606060", fontweight="bold" if fails else "normal",
                bbox=None if counts else {"facecolor": "#e8e8e8", "edgecolor": "none", "pad": 1.0},
            )  # fmt: skip
    axes.set_xlim(-0.5, len(contexts) - 0.5)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xticks(range(len(contexts)), [f"{context:,}" for context in contexts], fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
