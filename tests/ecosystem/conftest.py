"""What tests of several libraries share."""

import pytest

from tests.ecosystem.both import Both


@pytest.fixture(scope="package")
def language(tmp_path_factory):
    """Runs scripts about language on both libraries: transformers, PEFT, TRL and sentence-transformers are imported once."""
    models = ("bert", "gpt2", "llama")
    trainers = ("sft", "dpo", "reward", "grpo")
    both = Both(
        tmp_path_factory.mktemp("language"),
        [
            "datasets", "peft", "sentence_transformers", "transformers.trainer",
            *(f"transformers.models.{name}.modeling_{name}" for name in models),
            *(f"trl.trainer.{name}_trainer" for name in trainers),
        ],
    )  # fmt: skip
    yield both
    both.close()
