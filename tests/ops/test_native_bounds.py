"""No call of a native kernel leaves its tensors: every range outside them is refused, naming the argument."""

import dataclasses
from typing import Any

import pytest
import torch
from cases import GuardedStream
from cases import packed_attention as attention_cases
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from rotaryquant.errors import UnsupportedKernelError
from rotaryquant.formats.kv import StreamFormat
from rotaryquant.ops import native
from rotaryquant.ops.append_packed import append_packed
from rotaryquant.ops.packed_attention import packed_attention
from rotaryquant.ops.rotate import build_rotation

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))

KEY = StreamFormat("key", 64, 3, "score")
NARROW = StreamFormat("key", 32, 3, "score")


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("match", "change"),
    [
        ("block_table", {"block_table": int32(0, 4)[None]}),
        ("block_table", {"block_table": int32(-1, 0)[None]}),
        ("block_table", {"block_table": int32(0)[None]}),
        ("block_table", {"block_table": int32(0, 1)}),
        ("block_table", {"block_table": torch.zeros(1, 2, dtype=torch.int64)}),
        ("src_begin", {"src_begin": int32(-1)}),
        ("src_begin", {"src_begin": int32(1)}),
        ("counts", {"counts": int32(201)}),
        ("counts", {"counts": int32(-1)}),
        ("counts", {"counts": int32(1, 1)}),
        ("dst_begin", {"dst_begin": int32(-1)}),
        ("dst_begin", {"dst_begin": int32(57)}),
        ("dst_begin", {"dst_begin": int32(2**31 - 1)}),
        ("mean", {"mean": torch.zeros(1, 2, 64)}),
        ("num_kv_heads", {"x": torch.zeros(1, 2, 200, 64), "rotation": build_rotation(KEY, 0, 2)}),
        ("width", {"x": torch.zeros(1, 1, 200, 32), "rotation": build_rotation(NARROW, 0, 1)}),
    ],
)  # fmt: skip
def test_append_refuses_ranges_outside_its_tensors(match: str, change: dict[str, Any]) -> None:
    guarded = GuardedStream(KEY, 4, 1)
    arguments: dict[str, Any] = {
        "x": torch.randn(1, 1, 200, 64),
        "rotation": build_rotation(KEY, 0, 1),
        "stream": guarded.stream,
        "block_table": int32(0, 3)[None],
        "src_begin": int32(0),
        "counts": int32(200),
        "dst_begin": int32(0),
    }
    with pytest.raises(ValueError, match=match) as caught:
        append_packed(**{**arguments, **change}, kernel="cpu")
    assert not isinstance(caught.value, UnsupportedKernelError)
    assert all(bool((codes == 0xFF).all()) for codes in guarded.stream.codes), "nothing may be written before checks"
    assert append_packed(**arguments, kernel="cpu") == -1


@pytest.mark.parametrize(
    ("match", "view_change", "option_change"),
    [
        ("block_table", {"block_table": int32(*[9] * 3)[None]}, {}),
        ("block_table", {"block_table": int32(0, 1, -2)[None]}, {}),
        ("block_table", {"block_table": int32(0, 1)[None]}, {}),
        ("packed_lens", {"packed_lens": int32(-1)}, {}),
        ("packed_lens", {"packed_lens": int32(257, 1)}, {}),
        ("seq_lens", {"seq_lens": torch.tensor([257])}, {}),
        ("num_sinks", {"num_sinks": -1}, {}),
        ("dense_values", {"dense_values": torch.zeros(1, 2, 23, 64)}, {}),
        ("dense_positions", {"dense_positions": int32(*range(22))[None]}, {}),
        ("mask", {}, {"mask": torch.ones(1, 1, 3, 256, dtype=torch.bool)}),
        ("mask", {}, {"mask": torch.ones(1, 1, 3, 260, dtype=torch.bool)}),
        ("mask", {}, {"mask": torch.ones(1, 3, 3, 300, dtype=torch.bool)}),
        ("means", {"means": torch.zeros(1, 2, 63)}, {}),
        ("num_kv_heads", {"value_rotation": build_rotation(StreamFormat("value", 128, 3, "value"), 0, 1)}, {}),
        ("differ in width", {"value_rotation": build_rotation(StreamFormat("value", 64, 3, "value"), 0, 2)}, {}),
        ("sink_logits", {}, {"sink_logits": torch.zeros(3)}),
    ],
)
def test_attention_refuses_ranges_outside_its_tensors(
    match: str, view_change: dict[str, Any], option_change: dict[str, Any]
) -> None:
    spec = attention_cases.Spec((257,), rows=3, kv_heads=2, group=2, tail=17, sinks=4)
    item = attention_cases.inputs("bounds", spec)
    view = dataclasses.replace(item.view, **view_change)
    with pytest.raises(ValueError, match=match) as caught:
        packed_attention(item.q, view, kernel="cpu", **{**item.options, **option_change})
    assert not isinstance(caught.value, UnsupportedKernelError)


@pytest.mark.parametrize(
    ("match", "change"),
    [
        ("slots", {"slot": -1}),
        ("slots", {"slot": 6}),
        ("keys", {"held_keys": torch.zeros(1, 2, 8, 64, dtype=torch.float64)}),
        ("keys", {"held_keys": torch.zeros(1, 3, 8, 64)}),
        ("keys", {"held_keys": torch.zeros(1, 2, 8, 128)[..., ::2]}),
        ("columns", {"values": torch.ones(1, 2, 2, 32)}),
        ("values", {"values": torch.ones(1, 2, 3, 64)}),
        ("values", {"values": torch.ones(1, 2, 3, 32, dtype=torch.int32)}),
        ("rows", {"keys": torch.ones(2, 3, 64)}),
    ],
)  # fmt: skip
def test_stage_refuses_ranges_outside_its_tensors(match: str, change: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {
        "keys": torch.ones(1, 2, 3, 64),
        "values": torch.ones(1, 2, 3, 32),
        "held_keys": torch.zeros(1, 2, 8, 64),
        "held_values": torch.zeros(1, 2, 8, 32),
        "slot": 5,
    }
    native.module().stage(**arguments, threads=1)
    assert int(arguments["held_keys"].sum()) == 2 * 3 * 64
    held = [arguments["held_keys"].zero_(), arguments["held_values"].zero_()]
    with pytest.raises(ValueError, match=match):
        native.module().stage(**{**arguments, **change}, threads=1)
    assert not any(bool(tensor.any()) for tensor in held)


def test_tensors_are_read_as_they_are() -> None:
    """Whatever their class and gradient; and nothing is read that is not a tensor in memory."""
    held = torch.zeros(2, 1, 2, 4, 8)

    def stage(keys: Any, values: Any) -> None:
        native.module().stage(keys, values, held[0], held[1], 1, 1)

    wide = torch.randn(1, 2, 3, 24)
    stage(torch.nn.Parameter(torch.ones(1, 2, 3, 8)), wide[..., 1:17:2].requires_grad_())
    assert bool((held[0, :, :, 1:] == 1).all())
    assert torch.equal(held[1, :, :, 1:], wide[..., 1:17:2])
    assert not bool(held[:, :, :, 0].any())
    rows = torch.ones(1, 2, 3, 8)
    with FakeTensorMode():
        fake = torch.ones(1, 2, 3, 8)
    for other in (rows.numpy(), rows.to("meta"), fake, rows.to_sparse(), rows[(None,) * 6], None, 3):
        with pytest.raises((TypeError, ValueError)):
            stage(rows, other)
