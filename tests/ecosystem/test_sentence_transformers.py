"""sentence-transformers trains the same with Headway and with Accelerate."""

import pytest

pytestmark = pytest.mark.slow


def check_equal(sides, tolerance):
    differences = sides.differences()
    assert differences.keys() >= {"loss", "grad_norm", "eval_made_spearman_cosine", "parameters", "embeddings"}
    assert {name: value for name, value in differences.items() if value > tolerance} == {}


@pytest.mark.parametrize("way", ["pairs", "scored", "cached", "several"])
def test_sentence_transformers_train_as_with_accelerate_on_one_process(language, way):
    check_equal(language.run("sentence", way), 0.0)


@pytest.mark.parametrize("way", ["pairs", "scored", "cached", "several"])
def test_sentence_transformers_train_as_with_accelerate_on_two_processes(language, way):
    # The cached loss runs several backward passes inside one, so gradients are reduced in another order. The correlation of
    # twelve sentences shows the largest difference.
    check_equal(language.run("sentence", way, world_size=2), 1e-5 if way == "cached" else 1e-6)
