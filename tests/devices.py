"""Device for tests marked `on_device`: the CPU, or the device that TEST_DEVICE names (`make cuda` sets it to cuda)."""

import os

import torch

DEVICE = torch.device(os.environ.get("TEST_DEVICE", "cpu"))
ON_CPU = DEVICE.type == "cpu"
"""Argument for `Accelerator(cpu=ON_CPU)`. If it is False, the Accelerator uses the accelerator that torch finds."""
