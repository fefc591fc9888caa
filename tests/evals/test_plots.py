"""Pictures show what the data say; one that cannot be kept is refused before any work."""

from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from rotaryquant.evals import plots
from rotaryquant.measuring import Picture
from support.commands import Run, is_error
from support.tiny_llm import save_tiny


def drawn(picture: Picture) -> Figure:
    """The figure, laid out as a file would have it."""
    figure = Figure(figsize=(picture.width, picture.height), layout="constrained")
    picture.draw(figure)
    figure.canvas.draw()
    return figure


def texts(figure: Figure) -> list[str]:
    """All that is written in a figure: titles, labels, ticks, legends."""
    found = figure.findobj(lambda artist: hasattr(artist, "get_text") and artist.get_visible())
    return [text for artist in found if (text := artist.get_text())]


def grid_data(verdicts: list[str]) -> dict[str, Any]:
    results = []
    for number, verdict in enumerate(verdicts):
        low = -0.01 * number
        one = {
            "row": f"{number}%", "verdict": verdict, "difference": low + 0.02, "difference_low": low,
            "difference_high": 0.03, "kv": "iso3", "accuracy_16bit": 0.97, "accuracy": 0.96,
        }  # fmt: skip
        results += [one | {"context": length} for length in (4096, 8192)]
    return {"model": "tiny", "form": "chat", "contexts": [4096, 8192], "results": results}


def test_a_grid_has_every_cell_and_says_which_do_not_count() -> None:
    data = grid_data(["counts", "not discriminating", "too few questions", "counts"])
    figure = drawn(plots.grid_picture(data, "depth"))
    cells = [patch for part in figure.subfigs for axes in part.axes for patch in axes.patches]
    said = texts(figure)
    assert len(cells) == 3 * 8
    assert [cell.get_hatch() for cell in cells].count("////") == 3 * 4
    assert said.count("97.0") == said.count("96.0") == 8
    assert sum(text.endswith("\nnot discriminating") for text in said) == 2
    assert sum(text.endswith("\ntoo few questions") for text in said) == 2
    assert "+2.0\n(0.0..+3.0)" in said
    assert "\N{MINUS SIGN}1.0\n(\N{MINUS SIGN}3.0..+3.0)" in said


def test_divergence_over_the_window_starts_where_scoring_does() -> None:
    data = {"model": "tiny", "prefix": 256, "context": 321, "windows": 2, "text": "a.txt"}
    figure = drawn(plots.divergence_picture({"iso3": [torch.full((64,), 0.5), torch.full((64,), 1.5)]}, data))
    x, y = figure.axes[0].lines[0].get_data()
    assert list(x) == [264, 280, 296, 312]
    assert list(y) == [1.0] * 4  # the mean of both windows


def test_perplexity_has_a_line_for_each_cache_over_the_contexts() -> None:
    results = [
        {"kv": kv, "context": context, "ppl_ratio": ratio}
        for context in (512, 1024)
        for kv, ratio in (("fp16", 1.0), ("iso3", 1 + context / 1e5))
    ]
    figure = drawn(plots.perplexity_picture({"model": "tiny", "text": "a.txt", "results": results}))
    lines = {line.get_label(): line.get_data() for line in figure.axes[0].lines}
    assert [list(values) for values in lines["iso3"]] == [[512, 1024], [1 + 512 / 1e5, 1 + 1024 / 1e5]]
    assert list(lines["fp16"][1]) == [1.0, 1.0]
    assert {"512", "1,024"} <= set(texts(figure))


def test_an_ablation_colors_what_differs() -> None:
    def row(kv: str, low: float, high: float) -> dict[str, Any]:
        return {"kv": kv, "kld_of_base": (low + high) / 2, "kld_of_base_low": low, "kld_of_base_high": high}

    rows = [row("iso3", 1, 1), row("iso3,signs=off", 1.1, 1.3), row("iso3,seed=1", 0.9, 1.1), row("iso3,x=1", 0.7, 0.9)]
    data = {"model": "tiny", "base": "iso3", "windows": 3, "text": "a.txt", "results": rows}
    figure = drawn(plots.ablation_picture(data))
    spans = [line for line in figure.axes[0].lines if len(line.get_xdata()) == 2 and line.get_linestyle() == "-"]
    colors = {tuple(line.get_xdata()): line.get_color() for line in spans}
    assert len({colors[1.1, 1.3], colors[0.9, 1.1], colors[0.7, 0.9]}) == 3
    assert {"iso3", "signs=off", "seed=1", "x=1"} <= set(texts(figure))


def test_a_gate_marks_the_prompts_that_fail() -> None:
    good = {"kld_mean": 0.1, "repetition": 0.05, "exact_repetition": 0.02, "reasons": []}
    rows = [good | {"prompt": "one"}, good | {"prompt": "two", "repetition": 0.9, "reasons": ["circles"]}]
    data = {"model": "tiny", "kv": "iso3", "passed": False, "results": rows}
    figure = drawn(plots.gate_picture(data | {"limits": {"repetition": 0.22, "divergence": 0.5}}))
    bars = figure.axes[1].patches
    assert [bar.get_width() for bar in bars] == [0.9, 0.05]  # from below, the first prompt on top
    assert bars[0].get_facecolor() != bars[1].get_facecolor()
    assert any("does not pass" in text for text in texts(figure))


def test_stability_shows_each_reload_over_the_mean() -> None:
    row = {"kv": "iso3", "ppl": [9.0, 11.0], "ppl_mean": 10.0, "tokens_per_s": [4.0, 4.0], "tokens_per_s_mean": 4.0}
    figure = drawn(plots.stability_picture({"model": "tiny", "text": "a.txt", "reloads": 2, "results": [row]}))
    assert [list(axes.lines[0].get_ydata()) for axes in figure.axes] == [[0.9, 1.1], [1.0, 1.0]]


@pytest.mark.parametrize("judged", [True, False])
@pytest.mark.parametrize("device", [[], [(0.0, 50.0), (9.0, 51.0)]])
def test_a_soak_shows_memory_over_time(device: list[tuple[float, float]], judged: bool) -> None:
    data = {
        "model": "tiny", "kv": "iso3", "warm_up_s": 2.0, "rss_mb": [(0.0, 900.0), (9.0, 901.0)], "device_mb": device,
        "rss_slope_mb_per_hour": -1.25, "reasons": [],
    }  # fmt: skip
    figure = drawn(plots.soak_picture(data, judged))
    lines = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].lines}
    assert lines["resident"] == [900.0, 901.0]
    assert lines.get("on the device") == ([50.0, 51.0] if device else None)
    assert any("\N{MINUS SIGN}1.2 MB an hour" in text for text in texts(figure)) is judged


def test_a_profile_stacks_the_parts_of_a_step() -> None:
    rows = [
        {"kv": "fp16", "step_ms": 10.0, "attention_ms": 6.0, "rest_ms": 4.0},
        {"kv": "iso3", "step_ms": 5.0, "attention_ms": 2.0, "rest_ms": 3.0},
    ]
    data = {"model": "tiny", "context": 2048, "dtype": "float32", "results": rows}
    figure = drawn(plots.profile_picture(data, ("attention", "rest")))
    assert [(bar.get_x(), bar.get_width()) for bar in figure.axes[0].patches] == [(0, 2), (2, 3), (0, 6), (6, 4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048)
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog, again and again. " * 60)
    return folder


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fidelity", ["--text", "text.txt", "--context", "600", "--tokens", "200", "--any-baseline"]),
        ("perplexity", ["--text", "text.txt", "--context", "512", "--tokens", "200"]),
        ("ablate", ["--text", "text.txt", "--context", "600", "--tokens", "500", "--parts", "signs", "--any-baseline"]),
        ("gate", ["--tokens", "140", "--divergence", "99", "--repetition", "1"]),
        ("stability", ["--text", "text.txt", "--context", "600", "--tokens", "200", "--steps", "2", "--reloads", "2"]),
        ("soak", ["--text", "text.txt", "--seconds", "1", "--longest", "512"]),
        ("profile", ["--context", "600", "--steps", "2"]),
    ],
)
def test_every_measurement_draws(name: str, words: list[str], folder: Path, run: Run, tmp_path: Path) -> None:
    words = [str(folder / word) if word.endswith(".txt") else word for word in words]
    path = tmp_path / "picture.png"
    status, _, err = run("eval", name, str(folder), *words, "--threads", "1", "--plot", str(path))
    assert status in (0, 1), err  # random weights need not pass
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("path", "says"),
    [("/nowhere/at/all.png", "is no folder"), ("picture.doc", "ends in .png, .svg or .pdf"), ("picture", "ends in")],
)
def test_a_picture_that_cannot_be_kept_is_refused_before_any_work(path: str, says: str, run: Run) -> None:
    is_error(run("eval", "profile", "no-such-model", "--plot", path), 2, f"--plot {path}", says)


def test_benchmarks_draw_nothing(run: Run) -> None:
    status, _, err = run("bench", "append", "--plot", "a.png")
    assert status == 2
    assert "unrecognized arguments: --plot" in err
