"""Forecasts of two models whose cuDNN memory is unknown: the range contains what an H200 measured, and a caveat says why it is wide.

The measurements are of 2026-11-27, torch 2.11.0 (benchmarks/gpu/h200.md).
"""

from itertools import pairwise

import torch
from torch import nn

import headway

GRU_ALLOCATED = 1_508_895_232
"""Peak in bytes of the tensors in training steps of a two-layer bidirectional GRU in float32, with 64 x 200 tokens."""
UNET_ALLOCATED, UNET_RESERVED = 3_510_627_840, 4_418_699_264
"""Peaks in bytes of the tensors and of the allocator in training steps of a U-Net in float32, with 8 x 3 x 256 x 256 pixels."""


class Tagger(nn.Module):
    """A two-layer bidirectional GRU (256 to 512 features) that classifies each token."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(256, 512, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(1024, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(tokens)[0]).flatten(0, 1)


def make_block(num_inputs: int, num_outputs: int) -> nn.Sequential:
    """Return two convolutions, each with batch normalization and ReLU."""
    layers: list[nn.Module] = []
    for width in (num_inputs, num_outputs):
        layers += [nn.Conv2d(width, num_outputs, 3, padding=1, bias=False), nn.BatchNorm2d(num_outputs), nn.ReLU(True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """A U-Net with 64 base channels and four levels, which classifies each pixel of an image."""

    def __init__(self) -> None:
        super().__init__()
        widths = [64, 128, 256, 512, 1024]
        levels = list(pairwise(widths))
        self.stem = make_block(3, widths[0])
        self.encoder = nn.ModuleList(make_block(a, b) for a, b in levels)
        self.upsample = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in reversed(levels))
        self.decoder = nn.ModuleList(make_block(b, a) for a, b in reversed(levels))
        self.head = nn.Conv2d(widths[0], 2, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = [self.stem(images)]
        for block in self.encoder:
            features.append(block(nn.functional.max_pool2d(features[-1], 2)))
        result = features.pop()
        for upsample, block in zip(self.upsample, self.decoder):
            result = block(torch.cat([features.pop(), upsample(result)], 1))
        return self.head(result)


def test_range_contains_measured_memory_of_bidirectional_gru() -> None:
    found = headway.forecast(
        Tagger,
        lambda rows: (torch.zeros(rows, 200, 256), torch.zeros(rows * 200, dtype=torch.long)),
        loss=nn.functional.cross_entropy,
        batch_size=64,
        device="h200",
        largest=False,
    )
    assert found.allocated <= GRU_ALLOCATED <= found.most
    assert any("recurrent layers" in caveat and "twice" in caveat for caveat in found.caveats)


def test_range_contains_measured_memory_of_float32_unet() -> None:
    found = headway.forecast(
        UNet,
        lambda rows: (torch.zeros(rows, 3, 256, 256), torch.zeros(rows, 256, 256, dtype=torch.long)),
        loss=nn.functional.cross_entropy,
        batch_size=8,
        device="h200",
        largest=False,
    )
    assert found.allocated <= UNET_ALLOCATED
    assert found.reserved <= UNET_RESERVED <= found.most
    assert any("convolutions" in caveat and "upper end" in caveat for caveat in found.caveats)
