"""Packed weights and what they stand for; products of every kernel are in cases/dequant_matmul.py."""

import pytest
import torch

from rotaryquant.formats.weight import WeightFormat
from rotaryquant.ops import dispatch
from rotaryquant.ops.dequant_matmul import dequant_matmul, dequantize
from rotaryquant.ops.pack import pack
from rotaryquant.ops.weights import PackedWeight, WeightCodec

KERNELS = dispatch.kernels_of("dequant_matmul")


def random_weight(rows: int, form: WeightFormat, *stack: int) -> PackedWeight:
    """Any codes at all, and scales of either sign."""
    codes = torch.randint(0, 1 << form.bits, (*stack, rows, form.width), dtype=torch.uint8)
    scales = torch.randn(*stack, rows, form.groups).to(torch.bfloat16)
    return PackedWeight(WeightCodec.from_format(form), pack(codes, form.bits), scales)


def test_a_weight_is_its_scale_times_its_level() -> None:
    form = WeightFormat(32, 3, "trellis", 16)
    codes = torch.randint(0, 8, (1, 32), dtype=torch.uint8)
    weight = PackedWeight(
        WeightCodec.from_format(form), pack(codes, 3), torch.tensor([[2.0, -0.5]], dtype=torch.bfloat16)
    )
    for column in range(32):
        circle = column // 16 * 16
        before = int(codes[0, circle + (column - 1) % 16]) % form.classes
        level = form.levels[(before << 3) + int(codes[0, column])]
        assert float(dequantize(weight)[0, column]) == level * (2.0 if column < 16 else -0.5)


@pytest.mark.parametrize("kernel", KERNELS)
def test_matrices_of_a_stack_are_views(kernel: str) -> None:
    if reason := dispatch.missing("dequant_matmul", kernel):
        pytest.skip(f"kernel {kernel} not tried: {reason}")
    form = WeightFormat(64, 2, "trellis", 32)
    stack, x = random_weight(12, form, 3), torch.randn(2, 4, 64)
    for number in range(3):
        assert stack[number].codes.data_ptr() == stack.codes[number].data_ptr()
        expected = x @ dequantize(stack)[number].mT
        torch.testing.assert_close(dequant_matmul(x, stack[number], kernel=kernel), expected, rtol=1e-4, atol=1e-2)
    assert dequant_matmul(x[:0], stack[0], kernel=kernel).shape == (0, 4, 12)


def test_shapes_that_do_not_fit_are_named() -> None:
    form = WeightFormat(64, 4, "normal", 32)
    weight = random_weight(3, form)
    with pytest.raises(ValueError, match=r"x \(2, 32\) and a weight \(3, 64\)"):
        dequant_matmul(torch.zeros(2, 32), weight)
    with pytest.raises(ValueError, match="are not those of rows of 64 at 4 bits in groups of 32"):
        PackedWeight(weight.codec, weight.codes[:, :16], weight.scales)
