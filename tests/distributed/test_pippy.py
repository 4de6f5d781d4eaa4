"""`prepare_pippy`: inference through a pipeline gives the outputs of the whole model."""

import pytest
import torch
from torch import nn

from headway import prepare_pippy
from headway.core.runtime import process
from headway.errors import ConfigError, UnsupportedError
from tests.distributed.layouts import GPT, build_seeded, gpt2, llama, make_tokens, run_each
from tests.distributed.ranks import run_ranks


def run_whole_and_pipelined(make, inputs, **options):
    """Return the whole model's output, the pipeline's output, and the pipeline."""
    process.start(cpu=True)
    whole = build_seeded(0, make).eval()
    with torch.no_grad():
        expected = whole(inputs)
    model = prepare_pippy(build_seeded(0, make), **options)
    return expected, model(inputs), model


def gathered_outputs():
    expected, found, model = run_whole_and_pipelined(
        lambda: GPT(num_blocks=3), make_tokens(rows=7), num_chunks=3, gather_output=True
    )
    assert torch.allclose(found, expected, atol=1e-6)
    assert not found.requires_grad
    assert not model.training
    again = model(make_tokens(seed=2, rows=1))  # fewer rows than chunks
    assert again.shape[0] == 1


def outputs_on_the_last_process():
    expected, found, _ = run_whole_and_pipelined(llama, make_tokens(rows=4))
    if torch.distributed.get_rank() == 1:
        assert torch.allclose(found.logits, expected.logits, atol=1e-6)
    else:
        assert found is None


def split_points_and_keyword_arguments():
    rows = make_tokens(rows=4)
    expected, _, model = run_whole_and_pipelined(
        gpt2, rows, split_points=["transformer.h.1"], gather_output=True, example_args=(rows,)
    )
    found = model(input_ids=rows, attention_mask=torch.ones_like(rows))
    assert torch.allclose(found.logits, expected.logits, atol=1e-6)
    with pytest.raises(UnsupportedError, match="use_cache=False"):
        model(rows, use_cache=True)
    # A cache would be split, so each new token needs a pass over the whole sequence.
    plain = build_seeded(0, gpt2).eval()
    given = {"max_new_tokens": 3, "do_sample": False, "use_cache": False, "pad_token_id": 0}
    assert torch.equal(model.generate(rows[:, :4], **given), plain.generate(rows[:, :4], **given))


def wrong_arguments():
    with pytest.raises(ConfigError, match="give 'auto' or a list"):
        prepare_pippy(GPT(), split_points="blocks.1")
    with pytest.raises(ConfigError, match="num_chunks=0"):
        prepare_pippy(GPT(), num_chunks=0)


def run_scenarios():
    return run_each(
        [gathered_outputs, outputs_on_the_last_process, split_points_and_keyword_arguments, wrong_arguments]
    )


def test_pipeline_outputs_equal_those_of_the_whole_model():
    for failed in run_ranks(run_scenarios, 2, timeout=250):
        assert not failed, "\n".join(failed)


def test_model_is_unchanged_on_one_process():
    (same,) = run_ranks(prepare_on_one_process, 1)
    assert same


def prepare_on_one_process():
    process.start(cpu=True)
    model = nn.Sequential(nn.Linear(2, 2))
    return prepare_pippy(model) is model and not model.training
