"""How heavy the tails of a checkpoint's weights are: what tells which of them few bits would hurt."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from rotaryquant.errors import ModelFileError
from rotaryquant.models.roles import Role
from rotaryquant.weights.headers import TensorInfo

#: How often progress is told of, at most.
_STEPS = 20
_FLOATS = {"F64", "F32", "F16", "BF16"}


def excess_kurtosis(weight: Tensor) -> float:
    """E(w - mean)⁴ / (E(w - mean)²)² - 3 of all elements, in fp64: 0 for normal numbers, 0 for a constant too."""
    values = weight.double()
    square = (values - values.mean()).square()
    variance = float(square.mean())
    return float(square.square().mean()) / variance**2 - 3.0 if variance > 0 else 0.0


def kurtosis_by_role(
    tensors: Sequence[TensorInfo], roles: Mapping[str, Role], progress: Callable[[str, float], None]
) -> dict[Role, float]:
    """Mean excess kurtosis of the weights of each role, each tensor's own, weighted by its elements.

    tensors: of a checkpoint (weights.headers); matrices and stacks of them are read, one at a time. Raises
    ModelFileError where a matrix is not of floating-point numbers: what is quantised already has no tails to tell of.
    """
    sums: dict[Role, list[float]] = {}
    by_file: dict[Path, list[TensorInfo]] = {}
    for tensor in tensors:
        if len(tensor.shape) >= 2:
            by_file.setdefault(tensor.file, []).append(tensor)
    done, total = 0, sum(tensor.nbytes for own in by_file.values() for tensor in own)
    for path, own in by_file.items():
        with safe_open(path, "pt") as file:
            for tensor in own:
                if tensor.dtype not in _FLOATS:
                    raise ModelFileError(
                        f"{path}: tensor {tensor.name} holds {tensor.dtype}, not floating-point numbers; "
                        f"kurtosis is for checkpoints that are not quantised yet"
                    )
                role_sums = sums.setdefault(roles[tensor.name], [0.0, 0.0])
                role_sums[0] += tensor.elements * excess_kurtosis(file.get_tensor(tensor.name))
                role_sums[1] += tensor.elements
                if (done + tensor.nbytes) * _STEPS // total > done * _STEPS // total:
                    progress(f"kurtosis: {tensor.name}", (done + tensor.nbytes) / total)
                done += tensor.nbytes
    return {role: sums[role][0] / sums[role][1] for role in Role if role in sums}
