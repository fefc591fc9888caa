"""Rotation as the product with one dense matrix per head, built from the definition."""

from functools import lru_cache

import torch
from torch import Tensor

from rotaryquant.formats.rotation import hadamard
from rotaryquant.ops.rotate import Rotation

#: Matrices that are kept: of the streams of a model with 128 layers.
_KEPT = 256


def unsupported(x: Tensor, rotation: Rotation, inverse: bool) -> str | None:
    """Takes every call."""
    return None


@lru_cache(maxsize=_KEPT)
def dense_matrix(rotation: Rotation) -> Tensor:
    """The rotation as fp32 [num_kv_heads, width, width], so that y = R @ x."""
    if rotation.matrix is not None:
        return rotation.matrix
    device = rotation.signs.device if rotation.signs is not None else None
    device = rotation.blocks.device if device is None and rotation.blocks is not None else device
    matrix = torch.eye(rotation.width, device=device, dtype=torch.float64).repeat(rotation.num_kv_heads, 1, 1)
    if rotation.signs is not None:
        matrix = matrix * rotation.signs.double()[:, None, :]
    if rotation.hadamard:
        matrix = torch.from_numpy(hadamard(rotation.width)).to(matrix.device) @ matrix
    if rotation.blocks is not None:
        grouped = matrix.view(rotation.num_kv_heads, -1, 4, rotation.width)
        matrix = (rotation.blocks.double() @ grouped).view_as(matrix)
    return matrix.float()


def run(x: Tensor, rotation: Rotation, inverse: bool) -> Tensor:
    """Y = R x, or x = Rᵀ y."""
    matrix = dense_matrix(rotation).to(x.device)
    return x.float() @ (matrix if inverse else matrix.transpose(-1, -2))
