"""Test other libraries' names for a precision: the error gives Headway's name, wherever the precision is set."""

import pytest

from headway import Accelerator, TrainingArguments
from headway.core.config.launch import PRECISIONS as OWN
from headway.core.config.launch import SETTINGS
from headway.core.config.other_library_names import PRECISIONS, explain_precision
from headway.core.config.values import check_file_value, parse_text
from headway.errors import ConfigError

SETTING = SETTINGS["mixed_precision"]


@pytest.mark.parametrize(
    "give",
    [
        lambda word: parse_text(SETTING, word, "command line"),
        lambda word: check_file_value(SETTING, word, "config.yaml"),
        lambda word: Accelerator(cpu=True, mixed_precision=word),
        lambda word: TrainingArguments(output_dir="x", mixed_precision=word),
    ],
    ids=["text", "file", "Accelerator", "TrainingArguments"],
)
@pytest.mark.parametrize(("word", "own"), [("fp32", "no"), ("bfloat16", "bf16"), ("16-mixed", "fp16")])
def test_error_gives_headways_name(give, word, own):
    with pytest.raises(ConfigError, match=f"{word} is called {own}$"):
        give(word)


def test_only_allowed_values_are_suggested():
    assert set(PRECISIONS.values()) <= set(OWN)
    assert not PRECISIONS.keys() & set(OWN)
    assert explain_precision("float8", OWN) == "; float8 is called fp8"
    assert explain_precision("float8", ("no", "bf16")) == ""
    assert explain_precision("nothing-like-it", OWN) == ""
