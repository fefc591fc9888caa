"""Pictures of measurements; matplotlib is imported only when one is asked for."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rotaryquant.errors import ConfigError


def plot_divergence(path: Path, divergence: dict[str, list[Tensor]], data: dict[str, Any]) -> None:
    """Mean KL divergence over the position in the window, one line for each configuration.

    divergence: for each configuration the chunks' values in order, windows one after another. data: the report's, whose
    `context` is the tokens in a window, of which positions from `prefix` on are scored. Raises ConfigError where
    matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"--plot {path}: matplotlib is not installed ({error}); pip install 'rotaryquant[eval]'"
        ) from error
    first, scored = data["prefix"], data["context"] - 1 - data["prefix"]
    figure = Figure(figsize=(7.5, 4.0), dpi=150, layout="constrained")
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
