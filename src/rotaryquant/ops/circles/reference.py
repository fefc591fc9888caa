"""Viterbi's algorithm for each class to end with, in plain tensor operations."""

import torch
from torch import Tensor

from rotaryquant.formats.codebook import CYCLE

#: Circles that are searched together: 512 sums of each are held.
_TOGETHER = 4096


def unsupported(x: Tensor, levels: Tensor) -> str | None:
    """Takes every call."""
    return None


def run(x: Tensor, levels: Tensor) -> Tensor:
    """Codes int64 [circles, CYCLE]."""
    return torch.cat([_search(part, levels) for part in torch.split(x, _TOGETHER)])


def _first_least(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Smallest entries of integers along a dimension, and the first place of each."""
    count = x.shape[dim]
    order = torch.arange(count, device=x.device).view([-1 if d == dim else 1 for d in range(x.dim())])
    least = (x * count + order).amin(dim)
    return least // count, least % count


def _search(x: Tensor, levels: Tensor) -> Tensor:
    circles, classes = len(x), len(levels)
    cost = torch.full((circles, classes, classes), 1 << 40, device=x.device)  # of each last class and state
    cost.diagonal(dim1=1, dim2=2).zero_()
    came, chosen = [], []
    for column in range(CYCLE):
        error = (x[:, column, None, None] - levels).square().view(circles, classes, levels.shape[1] // classes, classes)
        step, code = _first_least(error, 2)  # [circles, class before, class], by the codes that lead there
        cost, before = _first_least(cost[..., None] + step[:, None], 2)
        came.append(before)
        chosen.append(code * classes + torch.arange(classes, device=x.device))
    state = _first_least(cost.diagonal(dim1=1, dim2=2), 1)[1]
    end, rows, codes = state, torch.arange(circles, device=x.device), torch.empty_like(x)
    for column in range(CYCLE - 1, -1, -1):
        before = came[column][rows, end, state]
        codes[:, column] = chosen[column][rows, before, state]
        state = before
    return codes
