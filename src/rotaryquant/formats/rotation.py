"""The rotation y = B·H·S·x, defined on numbers alone.

S: signs drawn from a seed. H: normalised Hadamard matrix of the full width (Sylvester x Paley 12/20/28).
B: block-diagonal SO(4), two unit quaternions per 4 coordinates. Everything here is a pure function of
(kind, width, seed, layer, head), so any implementation in any language can rebuild the same matrix.
"""

import math
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

#: rotation kind -> (uses Hadamard, block kind). `dense` is a random orthogonal matrix, as TurboQuant publishes it.
KINDS: dict[str, tuple[bool, str | None]] = {
    "isoquant": (True, "so4"),
    "hadamard": (True, None),
    "so4": (False, "so4"),
    "so3": (False, "so3"),
    "dense": (False, None),
    "none": (False, None),
}

_PALEY_ORDERS = (28, 20, 12)
_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15

# Streams of random words: what a word is drawn for is part of its seed, so draws never overlap.
_DRAW_SIGNS, _DRAW_QUATERNIONS, _DRAW_DENSE = 1, 2, 3


def splitmix64(state: int, count: int) -> NDArray[np.uint64]:
    """`count` words of the SplitMix64 generator started at `state` (Steele, Lea, Flood 2014)."""
    with np.errstate(over="ignore"):
        z = np.uint64(state & _MASK64) + np.uint64(_GOLDEN) * np.arange(1, count + 1, dtype=np.uint64)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def _stream_state(seed: int, draw: int, layer: int, head: int, stream: int) -> int:
    """One 64-bit generator state per (seed, purpose, layer, head, stream)."""
    state = seed
    for part in (draw, layer, head, stream):
        state = int(splitmix64((state ^ (part * _GOLDEN)) & _MASK64, 1)[0])
    return state


def _uniforms(state: int, count: int) -> Array:
    """`count` numbers in (0, 1): the top 53 bits of each word, plus half a step."""
    return ((splitmix64(state, count) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _normals(state: int, count: int) -> Array:
    """`count` standard normal numbers by Box-Muller, a pair from each pair of uniforms."""
    u = _uniforms(state, 2 * ((count + 1) // 2)).reshape(-1, 2)
    radius, angle = np.sqrt(-2.0 * np.log(u[:, 0])), 2.0 * math.pi * u[:, 1]
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], -1).reshape(-1)[:count]


def signs(width: int, seed: int, layer: int, head: int, stream: int) -> Array:
    """Fixed random signs, shape [width], each +1 or -1: bit i % 64 of word i // 64 set means -1."""
    words = splitmix64(_stream_state(seed, _DRAW_SIGNS, layer, head, stream), -(-width // 64))
    bits = (words[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    return 1.0 - 2.0 * bits.reshape(-1)[:width].astype(np.float64)


def _is_square(value: int, prime: int) -> int:
    """Legendre symbol: 1 for a non-zero square modulo `prime`, -1 for a non-square, 0 for zero."""
    value %= prime
    return 0 if value == 0 else (1 if pow(value, (prime - 1) // 2, prime) == 1 else -1)


def _jacobsthal(prime: int) -> Array:
    return np.array([[_is_square(i - j, prime) for j in range(prime)] for i in range(prime)], dtype=np.float64)


def _paley(order: int) -> Array:
    """Unnormalised Hadamard matrix of order 12, 20 (Paley I) or 28 (Paley II)."""
    if order in (12, 20):
        q = order - 1
        core = np.zeros((order, order))
        core[0, 1:], core[1:, 0], core[1:, 1:] = 1.0, -1.0, _jacobsthal(q)
        return core + np.eye(order)
    q = order // 2 - 1
    conference = np.zeros((q + 1, q + 1))
    conference[0, 1:], conference[1:, 0], conference[1:, 1:] = 1.0, 1.0, _jacobsthal(q)
    off = np.array([[1.0, 1.0], [1.0, -1.0]])
    diagonal = np.array([[1.0, -1.0], [-1.0, -1.0]])
    return np.kron(conference, off) + np.kron(np.eye(q + 1), diagonal)


def hadamard_factors(width: int) -> tuple[int, int]:
    """(power of two, Paley order or 1) whose product is `width`.

    Raises ValueError where no full-width matrix of this construction exists.
    """
    for base in (1, *_PALEY_ORDERS):
        power = width // base
        if base * power == width and power > 0 and power & (power - 1) == 0:
            return power, base
    raise ValueError(
        f"head width {width}: no Hadamard matrix of that order is built here "
        f"(2^k times 1, 12, 20 or 28); use rotation=dense or rotation=so4"
    )


@cache
def hadamard(width: int) -> Array:
    """Normalised Hadamard matrix [width, width] = Sylvester(power) ⊗ Paley(base): index = a·base + b."""
    power, base = hadamard_factors(width)
    matrix: NDArray[Any] = np.ones((1, 1))
    while matrix.shape[0] < power:
        matrix = np.kron(np.array([[1.0, 1.0], [1.0, -1.0]]), matrix)
    if base > 1:
        matrix = np.kron(matrix, _paley(base))
    normalised: Array = matrix / math.sqrt(width)
    return normalised


def paley_base(order: int) -> Array:
    """Unnormalised Paley matrix [order, order] that kernels apply inside each group; order 1 gives [[1]]."""
    return np.ones((1, 1)) if order == 1 else _paley(order)


def quaternions(width: int, seed: int, layer: int, head: int, stream: int) -> Array:
    """Random unit quaternions [width // 4, 2, 4] as (w, x, y, z) with w >= 0: left and right of each block."""
    if width % 4:
        raise ValueError(f"head width {width} is not a multiple of 4, which SO(4) blocks need; use rotation=dense")
    q = _normals(_stream_state(seed, _DRAW_QUATERNIONS, layer, head, stream), 2 * width).reshape(-1, 2, 4)
    q /= np.linalg.norm(q, axis=-1, keepdims=True)
    flipped: Array = q * np.where(q[..., :1] < 0, -1.0, 1.0)
    return flipped


def so4_matrix(left: Array, right: Array) -> Array:
    """Matrix [4, 4] of x -> left · x · conj(right) for unit quaternions; orthogonal with determinant 1."""
    a, b, c, d = left
    by_left = np.array([[a, -b, -c, -d], [b, a, -d, c], [c, d, a, -b], [d, -c, b, a]])
    e, f, g, h = right[0], -right[1], -right[2], -right[3]
    by_right = np.array([[e, -f, -g, -h], [f, e, h, -g], [g, -h, e, f], [h, g, -f, e]])
    both: Array = by_left @ by_right
    return both


def so4_blocks(kind: str, width: int, seed: int, layer: int, head: int, stream: int) -> Array | None:
    """Block matrices [width // 4, 4, 4] of rotation `kind`, or None where it has no blocks.

    `so3` uses one quaternion on both sides, which leaves the first coordinate of each block unmixed.
    """
    block = KINDS[kind][1]
    if block is None:
        return None
    q = quaternions(width, seed, layer, head, stream)
    right = q[:, 0] if block == "so3" else q[:, 1]
    blocks: Array = np.stack([so4_matrix(left, r) for left, r in zip(q[:, 0], right, strict=True)])
    return blocks


def dense_matrix(width: int, seed: int, layer: int, head: int, stream: int) -> Array:
    """Random orthogonal matrix [width, width]: QR of a Gaussian matrix with the signs of R's diagonal fixed."""
    gauss = _normals(_stream_state(seed, _DRAW_DENSE, layer, head, stream), width * width).reshape(width, width)
    q, r = np.linalg.qr(gauss)
    fixed: Array = q * np.sign(np.diagonal(r))
    return fixed


def rotation_matrix(
    kind: str, width: int, seed: int, layer: int, head: int, stream: int, *, with_signs: bool = True
) -> Array:
    """The whole rotation as one orthogonal matrix R [width, width], so that y = R @ x (DESIGN section 3)."""
    if kind not in KINDS:
        raise ValueError(f"rotation={kind!r} is unknown; valid: {', '.join(KINDS)}")
    if kind == "dense":
        return dense_matrix(width, seed, layer, head, stream)
    matrix: NDArray[Any] = np.eye(width)
    if with_signs and kind != "none":
        matrix = matrix * signs(width, seed, layer, head, stream)
    if KINDS[kind][0]:
        matrix = hadamard(width) @ matrix
    blocks = so4_blocks(kind, width, seed, layer, head, stream)
    if blocks is not None:
        matrix = np.einsum("bij,bjk->bik", blocks, matrix.reshape(-1, 4, width)).reshape(width, width)
    return matrix
