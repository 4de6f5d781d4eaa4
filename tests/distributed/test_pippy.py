"""Inference through a pipeline gives what the whole model gives."""

import pytest
import torch
from torch import nn

from headway import prepare_pippy
from headway.core.runtime import process
from headway.errors import ConfigError, UnsupportedError
from tests.distributed.layouts import GPT, each, gpt2, llama, seeded, text
from tests.distributed.ranks import run_ranks


def answers(make, inputs, **options):
    """What the whole model answers, and what the pipeline does."""
    process.start(cpu=True)
    whole = seeded(0, make).eval()
    with torch.no_grad():
        expected = whole(inputs)
    model = prepare_pippy(seeded(0, make), **options)
    return expected, model(inputs), model


def all_outputs():
    expected, found, model = answers(lambda: GPT(num_blocks=3), text(rows=7), num_chunks=3, gather_output=True)
    assert torch.allclose(found, expected, atol=1e-6)
    assert not found.requires_grad
    assert not model.training
    again = model(text(seed=2, rows=1))  # fewer rows than chunks
    assert again.shape[0] == 1


def the_last_process_answers():
    expected, found, _ = answers(llama, text(rows=4))
    if torch.distributed.get_rank() == 1:
        assert torch.allclose(found.logits, expected.logits, atol=1e-6)
    else:
        assert found is None


def points_and_arguments_by_name():
    rows = text(rows=4)
    expected, _, model = answers(gpt2, rows, split_points=["transformer.h.1"], gather_output=True, example_args=(rows,))
    found = model(input_ids=rows, attention_mask=torch.ones_like(rows))
    assert torch.allclose(found.logits, expected.logits, atol=1e-6)
    with pytest.raises(UnsupportedError, match="use_cache=False"):
        model(rows, use_cache=True)
    # A cache would be in parts, so each token runs the whole sequence.
    plain = seeded(0, gpt2).eval()
    given = {"max_new_tokens": 3, "do_sample": False, "use_cache": False, "pad_token_id": 0}
    assert torch.equal(model.generate(rows[:, :4], **given), plain.generate(rows[:, :4], **given))


def wrong_arguments():
    with pytest.raises(ConfigError, match="give 'auto' or a list"):
        prepare_pippy(GPT(), split_points="blocks.1")
    with pytest.raises(ConfigError, match="num_chunks=0"):
        prepare_pippy(GPT(), num_chunks=0)


def checks():
    return each([all_outputs, the_last_process_answers, points_and_arguments_by_name, wrong_arguments])


def test_a_pipeline_answers_as_the_whole_model():
    for failed in run_ranks(checks, 2, timeout=250):
        assert not failed, "\n".join(failed)


def test_on_one_process_the_model_stays_whole():
    (same,) = run_ranks(alone, 1)
    assert same


def alone():
    process.start(cpu=True)
    model = nn.Sequential(nn.Linear(2, 2))
    return prepare_pippy(model) is model and not model.training
