"""The device of the tests that are marked `on_device`: the CPU, or what TEST_DEVICE names (`make cuda` says cuda)."""

import os

import torch

DEVICE = torch.device(os.environ.get("TEST_DEVICE", "cpu"))
ON_CPU = DEVICE.type == "cpu"
"""For `Accelerator(cpu=ON_CPU)`: elsewhere it takes the accelerator that torch finds."""
