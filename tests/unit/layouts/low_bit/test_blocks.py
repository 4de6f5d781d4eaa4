"""Test that values of codes and scales become the same codes and scales again if the blocks do not change."""

import pytest
import torch

from headway.layouts.low_bit.blocks import dequantize_blocks, quantize_blocks

SIGNED = torch.tensor([-0.9, -0.4, -0.1, 0.0, 0.1, 0.4, 0.9, 1.0])
UNSIGNED = torch.tensor([0.0, 0.1, 0.4, 1.0])


def make_values(shape: tuple[int, ...], scale: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator) * scale
    values.view(-1)[8:24] = 0.0
    return values


@pytest.mark.parametrize("scale", [1.0, 1e-12])
@pytest.mark.parametrize("shape", [(64,), (5, 13), (3, 5), (0,), (2, 3, 8)])
@pytest.mark.parametrize("table", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])
def test_quantized_values_of_codes_equal_the_codes(table, shape, scale):
    given = make_values(shape, scale)
    codes, scales = quantize_blocks(given if table is SIGNED else given.abs(), table, 8)
    assert codes.shape == shape
    assert scales.numel() == -(-given.numel() // 8)
    again = quantize_blocks(dequantize_blocks(codes, scales, table, 8), table, 8)
    assert torch.equal(again[0], codes)
    assert torch.equal(again[1], scales)


def test_block_keeps_the_scale_of_a_negative_extreme():
    given = torch.tensor([0.2, -2.0, 0.8, -1.9])
    codes, scales = quantize_blocks(given, SIGNED, 4)
    assert scales.tolist() == [2.0]
    found = dequantize_blocks(codes, scales, SIGNED, 4)
    assert found.tolist() == pytest.approx([0.2, -2.0, 0.8, -1.8])


def test_shards_of_whole_blocks_equal_the_whole():
    given = make_values((16, 16), 1.0)
    codes, scales = quantize_blocks(given, SIGNED, 8)
    for number, part in enumerate(given.chunk(4)):
        own, some = quantize_blocks(part, SIGNED, 8)
        assert torch.equal(own, codes.chunk(4)[number])
        assert torch.equal(some, scales.chunk(4)[number])
