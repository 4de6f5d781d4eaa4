"""A few cells of the table of models. `python -m tests.sweep.parity --models` runs all of them."""

import pytest

from tests.sweep.model_table import LAYOUTS, measure

EQUAL = [
    ("T5", "fsdp"),
    ("Mamba", "pp"),
    ("Swin", "tp"),
    ("GPT-2", "fsdp+tp=2"),
    ("BERT", "pp=2+tp=2"),
    ("Qwen3-MoE", "ep"),
    ("Gemma 3", "pp=2+tp=2"),
    ("DeepSeek-V3", "pp=2+tp=2"),
    ("CNN, BatchNorm", "ddp"),
]
REFUSED = [
    (
        "Mamba",
        "tp",
        "has no tensor-parallel plan of its own, and its structure gives none that splits half of its matrices",
    ),
    ("Llama", "ep", "has no experts that ep=2 could distribute"),
    ("T5", "cp", "needs one stack of blocks"),
]


@pytest.mark.parametrize(("model", "layout"), EQUAL)
def test_model_matches_the_loop_by_hand(model, layout):
    found = measure(model, layout, LAYOUTS[layout], timeout=300)
    assert str(found) == "equal", found


@pytest.mark.parametrize(("model", "layout", "message"), REFUSED)
def test_model_is_refused_with_an_explanation(model, layout, message):
    found = measure(model, layout, LAYOUTS[layout], timeout=300)
    assert message in found.refusal
    assert not found.failure
