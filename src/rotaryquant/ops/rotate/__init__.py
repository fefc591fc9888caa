"""Rotation of rows: y = B·H·S·x, one rotation per KV head, and its inverse (paper: IsoQuant rotation)."""

from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import torch
from torch import Tensor

from rotaryquant.formats import rotation as rotations
from rotaryquant.formats.fit import Fit
from rotaryquant.formats.kv import StreamFormat
from rotaryquant.ops import dispatch

KERNELS = ("cpu", "reference")

#: Pairs of rotations that are kept: of the streams of a model with 128 layers.
_KEPT = 256


@dataclass(frozen=True, eq=False, slots=True)
class Rotation:
    """One rotation per KV head of a layer; unused factors are None or False.

    signs: fp32 [num_kv_heads, width]. hadamard: apply the normalised Hadamard matrix of the full width.
    blocks: fp32 [num_kv_heads, width // 4, 4, 4], orthogonal. matrix: fp32 [num_kv_heads, width, width], given
    only for the dense kind and for fitted streams, where it replaces the other factors. That of a fitted stream is
    not orthogonal: rows that are written and queries that meet them have two, each the other's inverse transpose.
    """

    width: int
    num_kv_heads: int
    signs: Tensor | None = None
    hadamard: bool = False
    blocks: Tensor | None = None
    matrix: Tensor | None = None


@cache
def _factors(
    stream: StreamFormat, layer: int, heads: tuple[int, ...]
) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
    """Signs, SO(4) blocks and dense matrix of the given global heads, stacked; computed once per process."""
    sources = [stream.rotation_source(layer, head) for head in heads]
    kind, width, seed = stream.rotation, stream.width, stream.seed
    if kind == "dense":
        return None, None, np.stack([rotations.dense_matrix(width, seed, *s) for s in sources])
    signs = None
    if stream.signs and kind != "none":
        signs = np.stack([rotations.signs(width, seed, *s) for s in sources])
    blocks = None
    if rotations.KINDS[kind][1] is not None:
        parts = [rotations.so4_blocks(kind, width, seed, *s) for s in sources]
        blocks = np.stack([part for part in parts if part is not None])
    return signs, blocks, None


def build_rotation(
    stream: StreamFormat, layer: int, num_kv_heads: int, *, first_head: int = 0, device: torch.device | str = "cpu"
) -> Rotation:
    """The rotation that `stream` prescribes for heads [first_head, first_head + num_kv_heads) of `layer`."""
    heads = tuple(range(first_head, first_head + num_kv_heads))
    signs, blocks, matrix = _factors(stream, layer, heads)

    def tensor(array: np.ndarray | None) -> Tensor | None:
        return None if array is None else torch.tensor(array, dtype=torch.float32, device=device)

    uses_hadamard = rotations.KINDS[stream.rotation][0]
    if uses_hadamard:
        rotations.hadamard_factors(stream.width)  # refuses a width for which no full-width matrix exists
    return Rotation(stream.width, num_kv_heads, tensor(signs), uses_hadamard, tensor(blocks), tensor(matrix))


@lru_cache(maxsize=_KEPT)
def fitted_rotations(
    stream: StreamFormat, layer: int, fit: Fit, device: torch.device | str = "cpu"
) -> tuple[Rotation, Rotation]:
    """How rows of a fitted stream are turned when they are written, R·A, and what meets them when they are read, R·A⁻ᵀ.

    R: the rotation that `stream` prescribes. fit: of all KV heads of `layer`. The pair is made once and shared.
    """
    heads, width = fit.shape
    turns = np.stack(
        [
            rotations.rotation_matrix(
                stream.rotation, width, stream.seed, *stream.rotation_source(layer, head), with_signs=stream.signs
            )
            for head in range(heads)
        ]
    )
    written, read = (
        torch.tensor(turns @ part, dtype=torch.float32, device=device)
        for part in (fit.balance.astype(np.float64), fit.dual)
    )
    return Rotation(width, heads, matrix=written), Rotation(width, heads, matrix=read)


def rotate(x: Tensor, rotation: Rotation, *, inverse: bool = False, kernel: str = "auto") -> Tensor:
    """Rotate every row of each head; `inverse` applies the transpose.

    x: [batch, num_kv_heads, rows, width], any float dtype. Returns fp32 of the same shape, contiguous.
    Raises ValueError where x does not fit the rotation.
    """
    if x.dim() != 4 or x.shape[1] != rotation.num_kv_heads or x.shape[3] != rotation.width:
        raise ValueError(
            f"x has shape {tuple(x.shape)}; wanted [batch, {rotation.num_kv_heads}, rows, {rotation.width}]"
        )
    result: Tensor = dispatch.run("rotate", kernel, x, rotation, inverse)
    return result
