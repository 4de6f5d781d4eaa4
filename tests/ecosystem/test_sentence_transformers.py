"""sentence-transformers trains the same on Headway as on Accelerate."""

import pytest

pytestmark = pytest.mark.slow


def compare(sides, tolerance):
    differences = sides.differences()
    assert differences.keys() >= {"loss", "grad_norm", "eval_made_spearman_cosine", "parameters", "embeddings"}
    assert {name: value for name, value in differences.items() if value > tolerance} == {}


@pytest.mark.parametrize("way", ["pairs", "scored", "cached", "several"])
def test_on_one_process(language, way):
    compare(language.run("sentence", way), 0.0)


@pytest.mark.parametrize("way", ["pairs", "scored", "cached", "several"])
def test_on_two_processes(language, way):
    # The cached loss runs several backward passes in one, whose gradients meet the reduction in another order; a correlation
    # of twelve sentences shows that most.
    compare(language.run("sentence", way, world_size=2), 1e-5 if way == "cached" else 1e-6)
