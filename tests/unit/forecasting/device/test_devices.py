"""Test finding GPUs by name."""

import pytest

from headway.errors import ConfigError
from headway.forecasting.device.devices import find_device


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA GeForce RTX 5090", "rtx-5090"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA L40S", "l40s"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_gpu_is_found_by_its_product_name(product, name):
    assert find_device(product).name == name


def test_gpu_is_described_by_its_memory():
    assert find_device("48GiB").memory == 48 << 30
    assert find_device("24 GB").memory == 24_000_000_000
    assert "only its memory was given" in find_device("48GiB").caveats[0]
    with pytest.raises(ConfigError, match="is not in the table"):
        find_device("many GiB")
