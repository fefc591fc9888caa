"""Pictures of measurements, from their data; matplotlib is imported only where one is drawn."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rotaryquant.evals.retrieval import grid
from rotaryquant.measuring import Picture

#: Points of difference at which the colors of a grid end.
_FULL_COLOR = 10
_OURS, _EXACT, _LIMIT = "#1f77b4", "#9a9a9a", "#c44e52"


def _bare(axes: Any, title: str) -> None:
    axes.set_title(title, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def divergence_picture(divergence: Mapping[str, Sequence[Tensor]], data: Mapping[str, Any]) -> Picture:
    """Mean KL divergence over the position in the window, one line for each configuration.

    divergence: for each configuration the chunks' values in order, windows one after another. data: of `eval fidelity`,
    whose `context` is the tokens in a window, of which positions from `prefix` on are scored.
    """
    first, scored, grain = data["prefix"], data["context"] - 1 - data["prefix"], 16

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for name, chunks in divergence.items():
            windows = torch.cat(list(chunks)).view(-1, scored)
            usable = scored // grain * grain
            means = windows[:, :usable].reshape(len(windows), -1, grain).mean((0, 2))
            places = range(first + grain // 2, first + usable, grain)
            axes.plot(places, means.clamp_min(1e-9).tolist(), label=name, lw=1.3)
        axes.set_yscale("log")
        axes.set_xlabel("position in the window")
        axes.set_ylabel("KL divergence, nats")
        axes.legend(frameon=False, fontsize=8)
        _bare(axes, f"{data['model']}: packed against 16-bit cache, {data['windows']} windows of {data['text']}")

    return Picture(7.5, 4.0, draw)


def perplexity_picture(data: Mapping[str, Any]) -> Picture:
    """Perplexity over the 16-bit cache's by context, one line for each cache. data: of `eval perplexity`."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for name in dict.fromkeys(row["kv"] for row in data["results"]):
            rows = [row for row in data["results"] if row["kv"] == name]
            color = _EXACT if name == "fp16" else None
            axes.plot(
                [row["context"] for row in rows],
                [row["ppl_ratio"] for row in rows],
                "o-",
                label=name,
                ms=4,
                color=color,
            )
        axes.set_xscale("log", base=2)
        contexts = sorted({row["context"] for row in data["results"]})
        axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
        axes.minorticks_off()
        axes.set_xlabel("tokens in a window, the second half scored")
        axes.set_ylabel("perplexity over the 16-bit cache's")
        axes.ticklabel_format(axis="y", useOffset=False)
        axes.legend(frameon=False, fontsize=8)
        _bare(axes, f"{data['model']}, {data['text']}")

    return Picture(6.5, 4.0, draw)


def ablation_picture(data: Mapping[str, Any]) -> Picture:
    """Divergence over the base's with its interval, a line for each change. data: of `eval ablate`."""
    rows = data["results"][::-1]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for place, row in enumerate(rows):
            middle, low, high = (row[f"kld_of_base{end}"] for end in ("", "_low", "_high"))
            worse = low > 1.0
            color = _LIMIT if worse else _OURS if high < 1.0 else _EXACT
            axes.plot([low, high], [place, place], color=color, lw=2)
            axes.plot([middle], [place], "o", color=color, ms=5)
        axes.axvline(1.0, color="black", lw=0.8, ls=":")
        axes.set_xscale("log")
        axes.set_yticks(range(len(rows)), [row["kv"].removeprefix(f"{data['base']},") for row in rows])
        axes.set_xlabel("KL divergence over the base's (95%); red: worse, blue: better")
        _bare(axes, f"{data['model']}, base {data['base']}, {data['windows']} windows of {data['text']}")

    return Picture(7.5, 1.4 + 0.3 * len(rows), draw)


def gate_picture(data: Mapping[str, Any]) -> Picture:
    """Divergence and repetition of each answer, with what is allowed. data: of `eval gate`."""
    rows, limits = data["results"][::-1], data["limits"]

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2, sharey=True)
        places = range(len(rows))
        colors = [_LIMIT if row["reasons"] else _OURS for row in rows]
        left.barh(places, [row["kld_mean"] for row in rows], color=colors, height=0.6)
        left.axvline(limits["divergence"], color=_LIMIT, lw=1, ls=":")
        left.set_xlabel("KL divergence on the 16-bit answer, nats", fontsize=8)
        left.set_yticks(places, [row["prompt"] for row in rows])
        right.barh(places, [row["repetition"] for row in rows], color=colors, height=0.6)
        right.plot([row["exact_repetition"] for row in rows], list(places), "|", color="black", ms=9)
        right.axvline(limits["repetition"], color=_LIMIT, lw=1, ls=":")
        right.set_xlabel("repetition; black: of the 16-bit answer", fontsize=8)
        verdict = "passes" if data["passed"] else "does not pass (red)"
        _bare(left, f"{data['model']}, kv={data['kv']}: {verdict}")
        _bare(right, "dotted: limits")

    return Picture(9.0, 1.2 + 0.28 * len(rows), draw)


def stability_picture(data: Mapping[str, Any]) -> Picture:
    """Perplexity and speed of each full reload, over their mean. data: of `eval stability`."""

    def draw(figure: Any) -> None:
        panels = figure.subplots(1, 2)
        for axes, key, what in zip(panels, ("ppl", "tokens_per_s"), ("perplexity", "tokens a second"), strict=True):
            for row in data["results"]:
                shares = [value / row[f"{key}_mean"] for value in row[key]]
                color = _EXACT if row["kv"] == "fp16" else None
                axes.plot(range(1, len(shares) + 1), shares, "o-", ms=4, label=row["kv"], color=color)
            axes.set_xticks(range(1, data["reloads"] + 1))
            axes.set_xlabel("reload")
            axes.ticklabel_format(axis="y", useOffset=False)
            _bare(axes, f"{what} over its mean")
        panels[0].legend(frameon=False, fontsize=8)
        figure.suptitle(f"{data['model']}, {data['text']}", fontsize=9)

    return Picture(8.5, 3.4, draw)


def soak_picture(data: Mapping[str, Any], judged: bool) -> Picture:
    """Memory over time. data: of `eval soak`. judged: whether it was long enough for its slope to mean anything."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for of, what, color in (("rss", "resident", _OURS), ("device", "on the device", "#55a868")):
            if samples := data[f"{of}_mb"]:
                axes.plot(*zip(*samples, strict=True), color=color, lw=1.0, label=what)
        if data["warm_up_s"] is not None:
            axes.axvline(data["warm_up_s"], color="black", lw=0.8, ls=":")
        axes.set_xlabel("seconds; dotted: end of the warm-up")
        axes.set_ylabel("MB")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=8)
        slope = data["rss_slope_mb_per_hour"]
        grown = f", {slope:+.1f} MB an hour".replace("-", _MINUS) if judged and slope is not None else ""
        _bare(axes, f"{data['model']}, kv={data['kv']}: {'; '.join(data['reasons']) or 'passes'}{grown}")

    return Picture(7.5, 3.6, draw)


def profile_picture(data: Mapping[str, Any], parts: Sequence[str]) -> Picture:
    """Where a step's time goes, a bar for each cache. data: of `eval profile`. parts: of a step."""
    rows = data["results"][::-1]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for place, row in enumerate(rows):
            begin = 0.0
            for number, part in enumerate(parts):
                taken = row[f"{part}_ms"]
                label = part if place == 0 else None
                axes.barh(place, taken, left=begin, height=0.55, color=f"C{number}", label=label)
                if taken > 0.06 * max(other["step_ms"] for other in rows):
                    axes.text(begin + taken / 2, place, f"{taken:.1f}", ha="center", va="center", fontsize=7)
                begin += taken
        axes.set_yticks(range(len(rows)), [row["kv"] for row in rows])
        axes.set_xlabel("ms of a step")
        axes.legend(frameon=False, fontsize=8, ncols=len(parts), loc="lower center", bbox_to_anchor=(0.5, 1.1))
        _bare(axes, f"{data['model']}, a step after {data['context']:,} tokens, {data['dtype']}")

    return Picture(7.5, 1.7 + 0.5 * len(rows), draw)


def grid_picture(data: Mapping[str, Any], row: str) -> Picture:
    """Three panels for each packed cache: accuracy at 16 bits, its own, and the difference with its interval.

    data: of `eval needle` or `eval ruler`. row: what the grid's rows are called. Cells that do not count are grey and
    hatched and say why; those that count and lose too much are bold.
    """
    cells, contexts = data["results"], list(data["contexts"])
    caches, names = (list(dict.fromkeys(cell[key] for cell in cells)) for key in ("kv", "row"))
    width, height = 1.0 + 3 * max(2.1, 1.1 * len(contexts)), 1.2 + 0.52 * len(names)

    def draw(figure: Any) -> None:
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

    return Picture(width, 0.8 + len(caches) * height, draw)


#: Of a panel: its title, the color of a cell, and what is written into it.
_Panel = tuple[str, Callable[[Mapping[str, Any]], Any], Callable[[Mapping[str, Any]], str]]


def _panels() -> list[_Panel]:
    from matplotlib import colormaps

    greens, signs = colormaps["YlGn"], colormaps["RdBu"]

    def accuracy(title: str, key: str) -> _Panel:
        return (
            title,
            lambda cell: greens(0.65 * cell.get(key, 0.0)),
            lambda cell: f"{100 * cell[key]:.1f}" if key in cell else grid.NOT_ASKED,
        )

    def color(cell: Mapping[str, Any]) -> Any:
        return signs(0.5 + 0.35 * max(-1.0, min(1.0, 100 * cell.get("difference", 0.0) / _FULL_COLOR)))

    def difference(cell: Mapping[str, Any]) -> str:
        if "difference" not in cell:
            return str(cell["verdict"])
        ends = "..".join(grid.points(cell[f"difference_{end}"]) for end in ("low", "high"))
        why = "" if cell["verdict"] == grid.COUNTS else f"\n{cell['verdict']}"
        return _minus(f"{grid.points(cell['difference'])}\n({ends})") + why

    return [
        accuracy("16-bit cache, % correct", "accuracy_16bit"),
        accuracy("packed cache, % correct", "accuracy"),
        ("packed less 16-bit, points (95%)", color, difference),
    ]


_MINUS = "\N{MINUS SIGN}"


def _minus(text: str) -> str:
    return text.replace("-", _MINUS)


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
