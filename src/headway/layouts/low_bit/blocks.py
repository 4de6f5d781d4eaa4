"""Block-wise quantization: convert codes and scales to float32 values, and back without loss if blocks do not change.

A block of values is stored as one scale, its largest absolute value, and one code per value. A code is the index of
an entry in a sorted table of values between -1 and 1. Tables of signed values contain 1 but not -1. A block whose
largest absolute value belongs to a negative number would therefore lose its scale: after dequantization, the absolute
values of all its numbers are smaller than the scale. `restore_extremes` sets the lowest value of such a block to minus
the scale, its value before quantization. Quantizing the dequantized block again then returns the same codes and scale.
"""

import torch


def restore_extremes(values: torch.Tensor, scales: torch.Tensor, lowest_level: torch.Tensor, block_size: int) -> None:
    """Restore the lowest value of each block that has lost its scale, by setting the value to minus the scale.

    A block has lost its scale if the absolute values of all its dequantized values are smaller than the scale. In
    addition, its lowest value must have the code of the table's lowest entry.

    Args:
        values: Contiguous dequantized values. They are changed in place.
        scales: Scale of each block.
        lowest_level: Scalar tensor with the lowest entry of the quantization table. If it is not negative, nothing
            changes.
        block_size: Number of values in a block. The last block may be shorter.
    """
    flat = values.view(-1)
    num_full = flat.numel() // block_size
    full_blocks = flat[: num_full * block_size].view(num_full, block_size)
    short_block = flat[num_full * block_size :].view(1, -1)
    for blocks, block_scales in ((full_blocks, scales[:num_full]), (short_block, scales[num_full:])):
        if blocks.numel():
            lowest, indices = blocks.min(1)
            has_lost_scale = blocks.abs().amax(1) < block_scales
            has_lowest_code = (lowest == lowest_level * block_scales) & (lowest_level < 0)
            restored = torch.where(has_lost_scale & has_lowest_code, -block_scales, lowest)
            blocks.scatter_(1, indices[:, None], restored[:, None])


def dequantize_blocks(codes: torch.Tensor, scales: torch.Tensor, table: torch.Tensor, block_size: int) -> torch.Tensor:
    """Convert quantization codes to float32 values, and restore the extremes of blocks with `restore_extremes`.

    Args:
        codes: Index of each value's entry in the table, as uint8.
        scales: Scale of each block.
        table: Sorted table of values between -1 and 1.
        block_size: Number of values in a block. The last block may be shorter.
    """
    scale_of_value = scales.repeat_interleave(block_size)[: codes.numel()].view(codes.shape)
    values = table[codes.int()] * scale_of_value
    restore_extremes(values, scales, table[0], block_size)
    return values


def quantize_blocks(values: torch.Tensor, table: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each value to the nearest entry of a table, relative to the scale of the value's block.

    Args:
        values: Float32 values of any shape.
        table: Sorted table of values between -1 and 1.
        block_size: Number of values in a block. The last block may be shorter.

    Returns:
        Pair of (codes in the shape of the values, scale of each block).
    """
    count = values.numel()
    padded = torch.nn.functional.pad(values.reshape(-1), (0, -count % block_size)).view(-1, block_size)
    scales = padded.abs().amax(1) if count else padded.new_zeros(0)
    divisors = torch.where(scales > 0, scales, torch.ones_like(scales))  # a block of zeros has the scale 0
    midpoints = (table[:-1] + table[1:]) / 2
    codes = torch.bucketize(padded / divisors[:, None], midpoints)
    return codes.view(-1)[:count].view(values.shape).to(torch.uint8), scales
