"""Accelerate's documented examples, rewritten from their descriptions: equal numbers with both libraries."""

import pytest

from tests.ecosystem.both import Both

pytestmark = pytest.mark.slow


EXAMPLES = {
    "complete NLP": ("examples_nlp", "--checkpointing_steps epoch"),
    "complete NLP, bf16, by steps": (
        "examples_nlp",
        "--checkpointing_steps 4 --mixed_precision bf16 --use_seedable_sampler",
    ),
    "complete CV": ("examples_cv", ""),
    "gradient accumulation": ("examples_accumulation", ""),
    "automatic gradient accumulation": ("examples_automatic_accumulation", ""),
    "accumulation for autoregressive models": ("examples_autoregressive", ""),
    "checkpointing": ("examples_checkpointing", ""),
    "cross-validation": ("examples_cross_validation", ""),
    "early stopping": ("examples_early_stopping", ""),
    "local SGD": ("examples_local_sgd", ""),
    "memory": ("examples_memory", ""),
    "multi-process metrics": ("examples_metrics", ""),
    "profiler": ("examples_profiler", ""),
    "schedule-free": ("examples_schedule_free", ""),
    "tracking": ("examples_tracking", ""),
    "DDP communication hook": ("examples_comm_hook", "fp16"),
    "DDP communication hook, PowerSGD": ("examples_comm_hook", "power_sgd"),
}
TOLERANCE = 1e-6
"""Tolerance with two processes, relative to the largest number of its kind. One process must be equal bit for bit."""


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> Both:
    return Both(tmp_path_factory.mktemp("examples"))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", EXAMPLES)
def test_numbers_are_equal(name, world_size, both):
    script, flags = EXAMPLES[name]
    found = both.run(script, *flags.split(), world_size=world_size).differences()
    assert len(found) >= 2
    assert max(found.values()) <= (0.0 if world_size == 1 else TOLERANCE), found
