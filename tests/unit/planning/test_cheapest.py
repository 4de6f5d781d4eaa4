"""Test `headway.cheapest`: ranked configurations, the first one against a real run."""

import json
from functools import partial

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import headway
from benchmarks.forecast.truth import measure_peak
from headway.cli.estimate import estimate as command
from headway.errors import ConfigError, LossError
from headway.forecasting.tracing.recipe import StepRecipe

PRODUCT = 2 * 64 * 512 * 64 * 64
"""Operations of 64 samples x 64 tokens times a layer's weights."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 512), nn.Linear(512, 64)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def build_net():
    return nn.Sequential(*[Block() for _ in range(4)])


def make_batch(size):
    return torch.zeros(size, 64, 64), torch.zeros(size, 64, 64)


def rank_configurations(**options):
    given = {"global_batch_size": 64, "device": "cpu", "loss": nn.functional.mse_loss, "precisions": ("no",), **options}
    return headway.cheapest(build_net, make_batch, **given)


@pytest.mark.slow
def test_first_row_runs_within_its_forecast():
    """25 MiB suffice neither for 64 samples nor for 32, which keep 2 x 512 x 64 floats for each layer and sample."""
    first = rank_configurations(budget="25MiB", recompute=(False,))[0]
    assert (first.micro_batch, first.accumulation, first.fits) == (16, 4, True)
    recipe = StepRecipe(torch.optim.AdamW, nn.functional.mse_loss, accumulation=first.accumulation)
    real = measure_peak(build_net(), recipe, partial(make_batch, first.micro_batch))
    assert real == pytest.approx(first.total, rel=0.03)
    assert real <= 25 << 20
    doubled = measure_peak(
        build_net(), StepRecipe(torch.optim.AdamW, nn.functional.mse_loss, accumulation=2), partial(make_batch, 32)
    )
    assert doubled > 25 << 20


@pytest.mark.slow
def test_recomputation_is_first_only_where_it_is_needed():
    roomy = rank_configurations(budget="1GiB")
    assert [row.recompute for row in roomy] == [False, True]
    assert all(row.fits and row.accumulation == 1 for row in roomy)
    assert roomy[0].cost == 1.0
    # The first product of each block is computed again. Nothing keeps the result of the second one.
    assert roomy[1].work.flops - roomy[0].work.flops == 4 * PRODUCT
    tight = rank_configurations(budget="25MiB", micro_batches=(64, 32))
    assert [(row.recompute, row.fits) for row in tight] == [(True, True), (False, False)]
    assert tight[0].cost == 1.0


@pytest.mark.slow
def test_flops_equal_those_of_the_products():
    """Two products of 64 x 512 for each token and block in forward, and two in backward, except for the first layer's inputs."""
    found = rank_configurations(budget="1GiB", recompute=(False,))[0].work
    assert found.flops == 4 * 2 * 3 * PRODUCT - PRODUCT


@pytest.mark.slow
def test_small_micro_batches_launch_more_kernels():
    large, small = (
        rank_configurations(budget="1GiB", recompute=(False,)),
        rank_configurations(budget="1GiB", recompute=(False,), micro_batches=(2,)),
    )
    assert (small[0].micro_batch, small[0].accumulation) == (2, 32)
    assert small[0].work.flops == large[0].work.flops
    assert small[0].work.launches > 10 * large[0].work.launches
    assert small[0].work.seconds > large[0].work.seconds


@pytest.mark.slow
def test_half_precision_and_a_smaller_optimizer_are_cheaper_on_a_gpu():
    rows = rank_configurations(
        device="a100-40gb",
        optimizers=("adamw", "sgd"),
        precisions=("no", "bf16"),
        recompute=(False,),
        global_batch_size=4096,
    )
    assert [(row.precision, row.optimizer) for row in rows] == [
        ("bf16", "sgd"),
        ("bf16", "adamw"),
        ("no", "sgd"),
        ("no", "adamw"),
    ]
    assert rows[0].cost == 1.0 < rows[1].cost < rows[2].cost


@pytest.mark.slow
def test_no_configuration_fits():
    rows = rank_configurations(budget="2MiB")
    assert [(row.fits, row.micro_batch, row.accumulation) for row in rows] == [(False, 1, 64)] * 2
    assert rows[0].cost == 1.0


@pytest.mark.slow
def test_combination_that_cannot_be_traced_has_the_reason_in_its_row():
    def reading(parameters):
        class Reading(torch.optim.SGD):
            def step(self, closure=None):
                self.param_groups[0]["params"][0].sum().item()
                super().step(closure)

        return Reading(parameters)

    rows = rank_configurations(budget="1GiB", optimizers=(reading, "sgd"), recompute=(False,))
    assert [(row.optimizer, row.fits) for row in rows] == [("sgd", True), ("reading", None)]
    assert "_local_scalar_dense" in rows[1].problem
    with pytest.raises(headway.errors.UnsupportedError, match="_local_scalar_dense"):
        rank_configurations(budget="1GiB", optimizers=(reading,))


def test_model_without_blocks_is_tried_without_recomputation():
    def build_plain():
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def make_rows(size):
        return torch.zeros(size, 8), torch.zeros(size, 8)

    asked = {"global_batch_size": 4, "loss": nn.functional.mse_loss, "device": "t4", "precisions": ("no",)}
    first, last = headway.cheapest(build_plain, make_rows, **asked)
    assert (first.recompute, first.fits, first.problem) == (False, True, "")
    assert last.recompute
    assert "no repeated blocks" in last.problem
    with pytest.raises(ConfigError, match="no repeated blocks"):
        headway.cheapest(build_plain, make_rows, recompute=(True,), **asked)


class ReadingNet(nn.Module):
    """Model that cannot be traced, and that has no repeated blocks to recompute."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        outputs = self.linear(x)
        return outputs * 2 if outputs.sum().item() > 0 else outputs


def test_error_is_raised_if_no_combination_can_be_traced():
    """With recomputation, the search for blocks fails before the trace does."""
    with pytest.raises(headway.errors.UnsupportedError, match="_local_scalar_dense"):
        headway.cheapest(
            ReadingNet, lambda size: torch.zeros(size, 8), global_batch_size=4, loss=lambda out, _: out.sum(),
            precisions=("no",), recompute=(False, True),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"micro_batches": 4}, "micro_batches=4; give a sequence of sizes"),
        ({"micro_batches": (3, 5)}, r"none of micro_batches=\[3, 5\] divides global_batch_size=64"),
        ({"micro_batches": (0,)}, "micro_batches has 0"),
        ({"global_batch_size": 0}, "global_batch_size=0"),
        ({"budget": None}, "give budget"),
        ({"precisions": "bf16"}, "give a tuple"),
        ({"precisions": ("fp8",)}, "precisions has 'fp8'"),
        ({"attention": ("eager",)}, "Sequential has no set_attn_implementation"),
    ],
)
def test_invalid_arguments_are_reported(options, said):
    with pytest.raises(ConfigError, match=said):
        rank_configurations(**{"budget": "1GiB", **options})
    with pytest.raises(LossError):
        rank_configurations(budget="1GiB", loss=None)


@pytest.mark.slow  # imports transformers
def test_command_prints_a_table_and_json(tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=100, n_positions=64).save_pretrained(tmp_path)

    def run_command(*more):
        return CliRunner().invoke(command, [str(tmp_path), "--device", "t4", "--global_batch_size", "4", *more])

    output = run_command("--attention", "eager", "--mixed_precision", "fp16")
    assert output.exit_code == 0, output.output
    lines = [line for line in output.output.splitlines() if line.startswith("fits")]
    assert len(lines) == 2
    assert all("fp16" in line and "eager" in line for line in lines)
    narrow = run_command("--json", "--activation_checkpointing", "--mixed_precision", "no", "--budget", "100MiB")
    assert narrow.exit_code == 1
    found = json.loads(narrow.stdout)
    assert [(row["micro_batch"], row["fits"], row["recompute"]) for row in found] == [(1, False, True)]
    wrong = run_command("--accumulation", "2")
    assert isinstance(wrong.exception, ConfigError)
    assert "--gradient_accumulation_steps and --global_batch_size" in str(wrong.exception)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs = nn.Linear(32, 96)

    def forward(self, x):
        parts = self.inputs(x).unflatten(-1, (3, 1, 32)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(*parts).squeeze(1)


def test_attention_is_counted_on_every_device():
    def count_flops(device):
        given = {"loss": nn.functional.mse_loss, "precisions": ("no",), "recompute": (False,), "budget": "1GiB"}
        rows = headway.cheapest(
            Attention, lambda n: (torch.zeros(n, 16, 32),) * 2, global_batch_size=8, device=device, **given
        )
        return rows[0].work.flops

    assert count_flops("cpu") == count_flops("t4") > 3 * 2 * 8 * 16 * 32 * 96


@pytest.mark.slow
def test_attention_of_one_row_does_not_change_the_next():
    """All models are made from one config object, in which transformers stores the name of the attention."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_attention_heads=8, num_hidden_layers=2, vocab_size=8, use_cache=False
    )

    def make_tokens(size):
        return dict.fromkeys(("input_ids", "labels"), torch.zeros(size, 256, dtype=torch.long))

    rows = headway.cheapest(
        lambda: transformers.LlamaForCausalLM(config), make_tokens, global_batch_size=4, micro_batches=(4,), device="cpu",
        budget="1GiB", precisions=("no",), recompute=(False,), attention=("eager", None),
    )  # fmt: skip
    totals = {row.attention: row.total for row in rows}
    assert totals["eager"] > totals[None] + 4 * 8 * 256 * 256 * 4  # the scores of all heads
    assert config._attn_implementation == "sdpa"
