"""The ops on a CUDA device against the same ops on the CPU, and a model whose cache lives there."""

import pytest
import torch

from rotaryquant.attention import AttentionOptions, attend
from rotaryquant.config import KVCacheConfig
from rotaryquant.counters import Counters
from rotaryquant.formats.kv import StreamFormat
from rotaryquant.kv.packed import PackedLayer
from rotaryquant.ops.pack import pack
from rotaryquant.ops.quantize import quantize
from rotaryquant.ops.rotate import build_rotation, rotate
from rotaryquant.ops.streams import Codec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("width", [64, 96, 128, 256])
def test_codes_on_the_device_are_those_of_the_cpu(bits: int, width: int) -> None:
    stream = StreamFormat("key", width, bits, "score")
    x = torch.randn(2, 3, 200, width)
    found = []
    for device in ("cpu", "cuda"):
        rotation = build_rotation(stream, 1, 3, device=device)
        y = rotate(x.to(device), rotation, kernel="reference")
        codes, scales = quantize(y, Codec.from_format(stream, device), kernel="reference")
        found.append((pack(codes, bits, kernel="reference").cpu(), scales.float().cpu()))
    assert float((found[0][0] != found[1][0]).float().mean()) <= 1e-3
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-2, atol=0)


@pytest.mark.parametrize("spec", [KVCacheConfig(), KVCacheConfig(sinks=0, tail=0, mean=False, protect=False)])
def test_a_cache_on_the_device_attends_as_on_the_cpu(spec: KVCacheConfig) -> None:
    keys, values = torch.randn(2, 2, 300, 64), torch.randn(2, 2, 300, 64)
    more, query = torch.randn(2, 2, 3, 64), torch.randn(2, 6, 3, 64)
    outs = []
    for device in ("cpu", "cuda"):
        layer, options = PackedLayer(spec, 0), AttentionOptions(0.125)
        layer.begin_prefill()
        layer.update(keys.to(device), values.to(device))
        attend(
            layer,
            torch.randn(2, 6, 300, 64, generator=torch.Generator().manual_seed(0)).to(device),
            options,
            Counters(),
        )
        layer.end_prefill()
        layer.update(more.to(device), more.to(device))
        outs.append(attend(layer, query.to(device), options, Counters()).cpu())
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-3, atol=1e-3)
