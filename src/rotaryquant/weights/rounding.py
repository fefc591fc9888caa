"""A matrix to codes: each weight to the nearest level, or so that errors cancel in what the matrix is used for.

With a Hessian H = E x·xᵀ of the inputs, an error E of the weights costs E·H·Eᵀ in the outputs. H = U·D·Uᵀ, U unit
upper triangular, turns that into one term a column: what is left of a column's error once the columns behind it have
taken over what they can. Rounding column after column, each with the errors so far carried over by U, makes every
term as small as one column's rounding can (GPTQ, arXiv 2210.17323; in this form QuIP, arXiv 2307.13304). Codes of a
trellis are chosen for 16 columns at once, and U is in blocks of 16. Scales are fitted last, all groups of a row
together, to the same cost.
"""

import torch
from torch import Tensor

from rotaryquant.errors import NonFiniteError
from rotaryquant.formats.codebook import CYCLE, FINE
from rotaryquant.formats.weight import WeightFormat, input_rotation
from rotaryquant.ops.circles import best_circles
from rotaryquant.ops.pack import pack
from rotaryquant.ops.weights import PackedWeight, WeightCodec

#: Added to a Hessian's diagonal, in units of its mean: inputs that calibration has not seen count a little.
RIDGE = 0.02

#: Added to the scales' equations, relative: groups whose codes are all but parallel have no one solution.
_STEADY = 1e-6


def round_matrix(weight: Tensor, form: WeightFormat, hessian: Tensor | None = None) -> PackedWeight:
    """Codes and scales of a matrix.

    weight: [rows, width], any float dtype. hessian: fp32 [width, width], mean of x·xᵀ over inputs (not rotated), or
    None to round each weight to its nearest level. Raises NonFiniteError where a weight or the Hessian is not finite.
    """
    width = weight.shape[1]
    if width != form.width:
        raise ValueError(f"a matrix of {width} columns for a format of {form.width}")
    work = weight.float()
    metric = torch.eye(width, device=weight.device) if hessian is None else hessian.float()
    refuse_non_finite(work, metric)
    if (rotation := input_rotation(form)) is not None:
        turn = torch.from_numpy(rotation).to(work)
        work, metric = work @ turn, turn.T @ metric @ turn if hessian is not None else metric
    metric = metric if hessian is None else steadied(metric)
    steps = first_scales(work, form)
    codec = WeightCodec.from_format(form, weight.device)
    codes = choose_codes(work, steps, codec, metric if hessian is not None else None)
    scales = fitted_scales(work, levels_of(codes, codec), metric, form, steps)
    return PackedWeight(codec, pack(codes.to(torch.uint8), form.bits), scales.to(torch.bfloat16))


def refuse_non_finite(weight: Tensor, hessian: Tensor) -> None:
    """Raise NonFiniteError where a matrix or the moment of its inputs is not finite."""
    for name, tensor in (("weights", weight), ("inputs", hessian)):
        if not bool(torch.isfinite(tensor).all()):
            raise NonFiniteError(f"{name} of a matrix {list(weight.shape)} are not finite; the checkpoint is damaged")


def steadied(metric: Tensor) -> Tensor:
    """A Hessian in units of its mean diagonal and with `RIDGE` more on it; where all inputs are zero, the identity."""
    identity, mean = torch.eye(len(metric), device=metric.device), metric.diagonal().mean()
    return (metric / mean if float(mean) > 0 else identity) + RIDGE * identity


def first_scales(work: Tensor, form: WeightFormat) -> Tensor:
    """Scale of each group as if its weights were normal, at 8 bits so that the largest fits: [rows, groups]."""
    groups = work.view(len(work), form.groups, form.group)
    if form.bits == 8:
        return (groups.abs().amax(-1) / 127.0).to(torch.bfloat16).float()  # as it is stored, before codes are chosen
    return groups.square().mean(-1).sqrt() * form.unit


def choose_codes(work: Tensor, steps: Tensor, codec: WeightCodec, metric: Tensor | None) -> Tensor:
    """Codes int64 [rows, width]. metric: what errors cost, or None where each column is rounded alone."""
    form = codec.format
    wide = steps.repeat_interleave(form.group, 1)
    inverse = torch.where(wide > 0, 1.0 / wide, torch.zeros_like(wide))
    if metric is None:
        return _nearest(work * inverse, codec)
    block = CYCLE if form.classes > 1 else 1
    carry = _block_upper(metric, block)
    codes, wanted = torch.empty(work.shape, dtype=torch.int64, device=work.device), work.clone()
    # errors inside a stretch of columns are carried over at once, those behind it a stretch at a time
    for begin in range(0, form.width, CYCLE):
        stretch = slice(begin, min(begin + CYCLE, form.width))
        for column in range(begin, stretch.stop, block):
            own = slice(column, column + block)
            codes[:, own] = _nearest(wanted[:, own] * inverse[:, own], codec)
            if own.stop < stretch.stop:
                error = work[:, own] - levels_of(codes[:, own], codec) * wide[:, own]
                wanted[:, own.stop : stretch.stop] += error @ carry[own, own.stop : stretch.stop]
        error = work[:, stretch] - levels_of(codes[:, stretch], codec) * wide[:, stretch]
        wanted[:, stretch.stop :] += error @ carry[stretch, stretch.stop :]
    return codes


def _block_upper(matrix: Tensor, block: int) -> Tensor:
    """U of matrix = U·D·Uᵀ, unit upper triangular in blocks of so many columns, D block diagonal."""
    cholesky = torch.linalg.cholesky(matrix.double().flip(0, 1)).flip(0, 1)  # upper triangular, matrix = C·Cᵀ
    blocks = cholesky.view(len(matrix), -1, block).movedim(1, 0)  # [blocks, width, block]
    own = torch.stack([cholesky[i : i + block, i : i + block] for i in range(0, len(matrix), block)])
    upper: Tensor = torch.linalg.solve(own, blocks, left=False)
    return upper.movedim(0, 1).flatten(1).float()


def _nearest(t: Tensor, codec: WeightCodec) -> Tensor:
    """Codes of values in units of a level's step: each the nearest, of a trellis the best circles."""
    form = codec.format
    if form.classes > 1:
        fine = (t * FINE + 0.5).floor().long().reshape(-1, CYCLE)
        return best_circles(fine, FINE * codec.levels.long().view(form.classes, -1)).view(t.shape)
    if form.grid == "uniform":
        half = 1 << (form.bits - 1)
        return (t + 0.5).floor().long().clamp(-half, half - 1) + half
    return torch.bucketize(t, (codec.levels[1:] + codec.levels[:-1]) / 2, right=True)


def levels_of(codes: Tensor, codec: WeightCodec) -> Tensor:
    """Level of each code, fp32; whole circles of a trellis."""
    form = codec.format
    if form.classes > 1:
        circles = codes.reshape(len(codes), -1, CYCLE)
        codes = ((circles.roll(1, -1) % form.classes << form.bits) + circles).flatten(-2)
    return codec.levels[codes]


def fitted_scales(work: Tensor, levels: Tensor, metric: Tensor, form: WeightFormat, steps: Tensor) -> Tensor:
    """Scales [rows, groups] with which the levels cost least, all groups of a row together; 8 bits keep `steps`."""
    if form.bits == 8:
        return steps
    spread = levels.view(len(work), form.groups, form.group)
    by_groups = metric.view(form.groups, form.group, form.groups, form.group)
    pairs = torch.stack(
        [
            torch.stack([((spread[:, a] @ by_groups[a, :, b]) * spread[:, b]).sum(-1) for b in range(form.groups)], -1)
            for a in range(form.groups)
        ],
        -2,
    )
    wanted = ((work @ metric).view_as(spread) * spread).sum(-1)
    own = pairs.diagonal(dim1=1, dim2=2)
    steady = _STEADY * own + (own == 0)  # a group of zeros has no scale of its own
    fitted = torch.linalg.solve(pairs + torch.diag_embed(steady), wanted)
    return torch.where(steps > 0, fitted, torch.zeros_like(fitted))
