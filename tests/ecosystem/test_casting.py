"""Layerwise casting gives the same numbers as Accelerate."""

import pytest

from tests.ecosystem.both import Both

pytestmark = pytest.mark.slow


def test_layerwise_casting_computes_as_with_accelerate(tmp_path):
    both = Both(tmp_path)
    for storage, compute in (("float8_e4m3fn", "bfloat16"), ("bfloat16", "float32"), ("float8_e5m2", "float32")):
        sides = both.run("layerwise_casting", storage, compute)
        differences = sides.differences()
        assert set(differences.values()) == {0.0}, differences
        assert 0 < sum(sides.headway[0]["hooked"]) < len(sides.headway[0]["hooked"])
