"""Offsets beyond 32 bits, proved by large strides over memory that is never touched."""

import pytest
import torch
from torch import Tensor

from rotaryquant import KVCacheConfig
from rotaryquant.kv.packed import PackedLayer
from support.drive import feed, packed_bytes
from support.kernels import force_kernel
from support.models import relative_error

STRICT = KVCacheConfig("strict", sinks=0, tail=0, mean=False, protect=False)
BLOCKS = 8
#: Bytes between two blocks: the last of 8 lies beyond 2^32, the fourth beyond 2^31.
STRIDE = 5 * 2**27


def far_apart(slab: Tensor) -> Tensor:
    """A slab of the same shape whose blocks lie `STRIDE` bytes apart in an untouched allocation."""
    step = STRIDE // slab.element_size()
    room = torch.empty((slab.shape[0] - 1) * step + slab[0].numel(), dtype=slab.dtype)
    return room.as_strided(slab.shape, (step, *slab.stride()[1:]))


@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_blocks_beyond_four_gigabytes_are_written_and_read(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rows in an ordinary slab and in one of 4.4 GB (of which 8 blocks are touched)."""
    force_kernel(monkeypatch, kernel)
    columns = BLOCKS * 128
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 1, columns, 32, generator=generator)
    near, far = (PackedLayer(STRICT, 0, max_tokens=columns) for _ in range(2))  # one slab for all
    for layer in (near, far):
        feed(layer, x, x, [1], prompt=1)  # opens the stores
    for store in (far.keys, far.values):
        assert store is not None
        for slabs in (store.packed.codes, store.packed.scales):
            old = slabs[0]
            try:
                slabs[0] = far_apart(old)
            except RuntimeError as error:  # no overcommit: the address space is not to be had
                pytest.skip(f"cannot reserve {STRIDE * BLOCKS} bytes: {error}")
            slabs[0].copy_(old)
    outputs = [feed(layer, x, x, [columns - 3, 1, 1], start=1) for layer in (near, far)]
    assert far.rows[0].blocks == list(range(BLOCKS))
    assert far.keys is not None
    assert far.keys.packed.codes[0].stride(0) * (BLOCKS - 1) > 2**32
    for got, want in zip(packed_bytes(far), packed_bytes(near), strict=True):
        assert torch.equal(got, want)
    assert relative_error(outputs[1], outputs[0]) < 1e-6
