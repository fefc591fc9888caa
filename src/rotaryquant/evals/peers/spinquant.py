"""SpinQuant's cache (arXiv 2405.16406): rotations learned on the Stiefel manifold, then asymmetric uniform codes per
token and head.

One rotation turns the keys of a layer after RoPE (where the paper has R3) and one its values (R2). Both start from a
Hadamard matrix with random signs, as the paper's do, and move by Cayley SGD (Li et al., arXiv 2002.01113). The paper
learns from the loss of the quantised network; here each layer learns from what its codes do to attention: the squared
error of logits, by the queries' second moment, and of values, each by the squared attention that it got.
"""

import torch
from torch import Tensor

from rotaryquant.evals.peers.rounding import ranged
from rotaryquant.evals.simulated import Peer, Place
from rotaryquant.formats.rotation import hadamard

_BITS = 3
_STEPS, _ROWS, _MOMENTUM, _REACH = 200, 512, 0.9, 0.2


def random_hadamard(width: int, generator: torch.Generator) -> Tensor:
    """Orthogonal fp32 [width, width]: random signs, then the normalised Hadamard matrix. For rows: x @ R."""
    signs = torch.randint(0, 2, (width, 1), generator=generator) * 2.0 - 1.0
    return signs * torch.tensor(hadamard(width), dtype=torch.float32)


def cayley_step(rotation: Tensor, gradient: Tensor, size: float) -> Tensor:
    """Orthogonal [width, width] a step down from `rotation` along the manifold: (I + W/2)⁻¹ (I - W/2) · rotation.

    gradient: of the loss there; W is its skew part, shortened so that its norm is `size`.
    """
    skew = gradient @ rotation.T
    skew = skew - skew.T
    skew = skew * (size / skew.norm().clamp_min(torch.finfo(skew.dtype).tiny))
    eye = torch.eye(len(rotation), dtype=rotation.dtype, device=rotation.device)
    moved: Tensor = torch.linalg.solve(eye + skew / 2, (eye - skew / 2) @ rotation)
    return moved


def learned_rotation(rows: Tensor, moment: Tensor | None, weights: Tensor | None, bits: int, seed: int) -> Tensor:
    """Orthogonal fp32 [width, width] that rows are multiplied with before they are coded.

    rows: fp32 [heads, tokens, width]. moment: [heads, width, width], by which errors count; None for the identity.
    weights: [heads, tokens], by which rows count; None for alike. Half of the rows teach, the other half chooses among
    the first rotation and those of every tenth step.
    """
    heads, tokens, width = rows.shape
    generator = torch.Generator().manual_seed(seed)
    rotation = random_hadamard(width, generator).to(rows.device)
    weights = torch.ones(heads, tokens, device=rows.device) if weights is None else weights

    def loss(by: Tensor, picked: Tensor) -> Tensor:
        turned = rows[:, picked] @ by
        error = (_coded(turned, bits) - turned) @ by.T
        felt = error if moment is None else error @ moment
        total: Tensor = ((felt * error).sum(-1) * weights[:, picked]).sum()
        return total

    order = torch.randperm(tokens, generator=generator).to(rows.device)
    teaching, judging = order[: tokens // 2], order[tokens // 2 :][: 4 * _ROWS]
    best, least = rotation, float(loss(rotation, judging))
    pull = torch.zeros_like(rotation)
    for step in range(_STEPS):
        picked = teaching[torch.randint(0, len(teaching), (_ROWS,), generator=generator).to(rows.device)]
        with torch.enable_grad():
            leaf = rotation.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(loss(leaf, picked), leaf)
        pull = _MOMENTUM * pull + gradient / gradient.norm().clamp_min(torch.finfo(gradient.dtype).tiny)
        rotation = cayley_step(rotation, pull, _REACH * (1 - step / _STEPS))
        if step % 10 == 9 and (found := float(loss(rotation, judging))) < least:
            best, least = rotation, found
    return best


def _coded(rows: Tensor, bits: int) -> Tensor:
    """Rows as their codes rebuild them; gradients pass the rounding as if it were not there (straight through)."""
    low, high = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp_min(torch.finfo(rows.dtype).tiny)
    place = (rows - low) / step
    rebuilt: Tensor = low + step * (place + (place.round() - place).detach())
    return rebuilt


class _Spinquant:
    def __init__(self, bits: int, place: Place) -> None:
        facts = place.facts
        assert facts is not None
        self._bits = bits
        self.key_bits = self.value_bits = bits + 32 / place.width
        # on the CPU, so that the rotations are the same wherever the model is
        weights = None if facts.value_weights is None else facts.value_weights.cpu()
        self._turns = (
            learned_rotation(facts.keys.cpu(), facts.query_moment.cpu(), None, bits, 2 * place.index),
            learned_rotation(facts.values.cpu(), None, weights, bits, 2 * place.index + 1),
        )

    def _rebuild(self, rows: Tensor, which: int) -> Tensor:
        turn = self._turns[which].to(rows.device)
        return ranged(rows @ turn, self._bits, rows.shape[-1]) @ turn.T

    def keys(self, rows: Tensor) -> Tensor:
        return self._rebuild(rows, 0)

    def values(self, rows: Tensor) -> Tensor:
        return self._rebuild(rows, 1)


PEERS = [
    Peer(
        "spinquant3",
        "SpinQuant, arXiv 2405.16406",
        "rotations learned by Cayley SGD from Hadamard matrices, 3-bit uniform codes, fp16 step and zero per row",
        lambda place: _Spinquant(_BITS, place),
        calibrated=True,
        at=lambda place, bits: _Spinquant(bits, place),
    )
]
