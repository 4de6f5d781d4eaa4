"""Test the functions that `headway estimate` makes for a forecast of a transformers model."""

import pytest

from headway.errors import ConfigError
from headway.planning.forecast_functions import make_length_search
from headway.planning.sources import make_config_source

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize(("num_positions", "multiple"), [(32, 32), (64, 64), (2048, 64)])
def test_length_search_ends_at_the_positions_of_the_model(num_positions: int, multiple: int) -> None:
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=8,
        max_position_embeddings=num_positions,
    )  # fmt: skip
    search = make_length_search(make_config_source(config, "small"))
    assert (search.limit, search.multiple) == (num_positions, multiple)
    assert search.batch_fn(3, num_positions)["input_ids"].shape == (3, num_positions)


def test_model_of_images_has_no_longest_sequence() -> None:
    config = transformers.ViTConfig(hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1)
    with pytest.raises(ConfigError, match="only a model of tokens has a longest sequence"):
        make_length_search(make_config_source(config, "images"))
