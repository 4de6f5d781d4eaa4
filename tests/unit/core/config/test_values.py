"""Suggestions for misspelled words."""

import pytest

from headway.core.config.values import find_similar_words, suggest_word


@pytest.mark.parametrize(
    ("word", "known", "expected"),
    [
        ("BF16", ["bf16", "fp16"], ["bf16"]),
        ("bf16", ["BF16", "FP16"], ["BF16"]),  # capitals on either side
        ("sgd", ["SGD", "AdamW"], ["SGD"]),
        ("a-b-c", ["a_b_c_d"], ["a_b_c_d"]),
        ("learning-rat", ["LEARNING_RATE", "warmup"], ["LEARNING_RATE"]),
        ("adam", ["adamw", "adamax", "adam8bit", "adam4bit"], ["adamw", "adamax", "adam8bit"]),
        ("pathways", ["fsdp", "ddp"], []),
        ("ts", ["tp", "test", "tsx"], ["tsx"]),  # too short to be completed: the most similar one
    ],
)
def test_similar_words_ignore_case_and_dashes(word, known, expected):
    assert find_similar_words(word, known) == expected


def test_suggestion_is_a_question():
    assert suggest_word("FSPD", ["fsdp", "ddp"], prefix="--") == "; did you mean --fsdp?"
    assert suggest_word("pathways", ["fsdp"]) == ""
