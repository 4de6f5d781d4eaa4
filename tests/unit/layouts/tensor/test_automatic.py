"""Test plans found from the structure of a model: what is split, how heads are counted, and what stays whole."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention, softmax

from headway.core.config.parallelism import TensorParallelOptions
from headway.errors import PrepareError
from headway.layouts.tensor import automatic, plans
from headway.layouts.tensor.crossings import SplitAxis
from headway.layouts.tensor.sequence_split import arrange_sequences
from tests.sweep.models import CASES


def find_plan(model: nn.Module, size: int = 2, is_sharded: bool = False) -> TensorParallelOptions:
    return automatic.complete_plan(model, TensorParallelOptions(), size, is_sharded)


class PackedAttention(nn.Module):
    """Attention of nanoGPT: one matrix for q, k and v, and a head count used by forward."""

    def __init__(self, n_embd: int = 16, n_head: int = 4) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.n_head, self.n_embd = n_head, n_embd
        self.register_buffer("bias", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.size()
        parts = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (each.view(rows, length, self.n_head, -1).transpose(1, 2) for each in parts)
        scores = (q @ k.transpose(-2, -1)).masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf"))
        mixed: torch.Tensor = self.c_proj((softmax(scores, -1) @ v).transpose(1, 2).reshape(rows, length, -1))
        return mixed


class FlatBlock(nn.Module):
    """Block with all matrices side by side, norms within heads, and keys that queries may share."""

    def __init__(
        self, width: int = 16, num_keys: int = 4, between: Callable[[torch.Tensor], torch.Tensor] = gelu
    ) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, 4 * num_keys), nn.Linear(width, 4 * num_keys)
        self.out, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 32), nn.Linear(32, width)
        self.norm_q, self.head_dim, self.between = nn.LayerNorm(4), 4, between

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = scaled_dot_product_attention(self.norm_q(q), k, v, mask, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(self.between(self.up(x)))


class Stack(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, None)
        return x


def test_matrices_side_by_side_are_split_in_the_order_of_their_calls() -> None:
    options = find_plan(Stack(FlatBlock))
    rows = dict.fromkeys(("blocks.*.out", "blocks.*.down"), "rowwise")
    columns = dict.fromkeys((f"blocks.*.{name}" for name in ("q", "k", "v", "up")), "colwise")
    # The norm acts only on this rank's heads, so its gradient is a term of the sum.
    assert options.plan == {**columns, **rows, "blocks.*.norm_q": "replicated_with_grad_allreduce"}
    assert options.divide == ()


def test_heads_that_do_not_divide_leave_their_matrices_whole() -> None:
    plan = find_plan(Stack(lambda: FlatBlock(num_keys=1))).plan
    assert plan == {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    assert find_plan(Stack(FlatBlock), 8).plan == plan


def test_packed_matrices_and_counted_heads() -> None:
    model = nn.Sequential(nn.LayerNorm(16), PackedAttention())
    options = find_plan(model)
    assert options.plan == {"*.c_attn": "packed_qkv_colwise", "*.c_proj": "rowwise"}
    assert set(options.divide) == {"*.n_head", "*.n_embd"}
    # If parameters are also sharded along the packed dimension, the parts are joined again.
    sharded = find_plan(model, is_sharded=True)
    assert sharded.plan == {"*.c_attn": "colwise_gather_output", "*.c_proj": "rowwise_split_input"}
    assert (sharded.divide, sharded.keep) == ((), ("*.n_head",))


@pytest.mark.parametrize(
    "between", [lambda x: softmax(x, -1), lambda x: x - x.mean(-1, keepdim=True), lambda x: x.flip(-1)]
)
def test_matrices_around_an_operation_that_mixes_outputs_are_not_split(between: Any) -> None:
    plan = find_plan(Stack(lambda: FlatBlock(between=between))).plan
    assert plan is not None
    assert {name.removeprefix("blocks.*.") for name in plan} == {"q", "k", "v", "out", "norm_q"}


@pytest.mark.parametrize("name", ["Mamba", "ConvNeXt", "U-Net", "CNN, BatchNorm", "LSTM"])
def test_models_without_such_matrices_have_no_plan(name: str) -> None:
    assert find_plan(CASES[name].make()).plan is None


def test_model_without_values_has_the_same_plan_and_nothing_changes() -> None:
    """Neither values nor modes nor the random state change, and hooks of the user are not called."""
    with torch.device("meta"):
        bare = CASES["T5"].make()
    model, calls = CASES["T5"].make().train(), []
    for module in model.modules():
        module.register_forward_hook(lambda *_: calls.append(1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    options = find_plan(model)
    assert options == find_plan(bare)
    assert options.plan is not None
    assert options.plan["encoder.block.*.layer.*.SelfAttention.relative_attention_bias.weight"] == "rowwise"
    assert options.divide
    assert torch.equal(random, torch.get_rng_state())
    assert not calls
    assert all(module.training for module in model.modules())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def build_transformers_model(name: str, **sizes: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, name.replace("ForCausalLM", "Config"))
    return getattr(transformers, name)(config(vocab_size=64, **sizes))  # type: ignore[no-any-return]


def test_module_that_cannot_be_called_alone_is_not_split() -> None:
    """MPT's attention gets positions of all heads, which the trial call does not know."""
    assert find_plan(build_transformers_model("MptForCausalLM", d_model=16, n_layers=2, n_heads=4)).plan is None


class WithoutHooks(nn.LayerNorm):
    def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no hooks")


def test_module_that_refuses_hooks_is_not_split() -> None:
    block = FlatBlock()
    block.norm_q = WithoutHooks(4)
    assert find_plan(Stack(lambda: block)).plan is None


def list_gathered(model: nn.Module) -> list[str]:
    options = replace(find_plan(model), sequence_parallel=True)
    model_split = plans.read_plan(model, SplitAxis(None, None, 0, 2), options)
    sequences = arrange_sequences(model, model_split)
    automatic.check_blocks(model, model_split, sequences)
    return sequences.gathered


def test_attention_that_stays_whole_is_refused_with_parts_of_sequences() -> None:
    """The check uses both halves, because to causal attention the first half is a complete sequence."""
    model = build_transformers_model("GPTBigCodeForCausalLM", n_embd=16, n_layer=2, n_head=4, n_positions=32)
    assert not any("attn" in name for name in find_plan(model).plan or {})
    with pytest.raises(PrepareError, match=r"h\.0' .GPTBigCodeBlock. could not be shown"):
        list_gathered(model)


def test_modules_that_get_whole_sequences() -> None:
    assert list_gathered(CASES["GPT-2"].make())[:2] == ["transformer.h.0.attn", "transformer.h.0.mlp"]
    # BERT normalizes within its attention block, on parts. Only the attention itself gets whole sequences.
    assert list_gathered(CASES["BERT"].make())[:2] == [
        "bert.encoder.layer.0.attention.self",
        "bert.encoder.layer.0.intermediate",
    ]
    decoder = [name for name in list_gathered(CASES["T5"].make()) if name.startswith("decoder.block.0.")]
    assert [name.rpartition(".")[2] for name in decoder] == ["SelfAttention", "EncDecAttention", "DenseReluDense"]


def test_given_plan_and_plan_of_the_model_are_kept() -> None:
    given = TensorParallelOptions({"blocks.0.up": "colwise_gather_output"})
    assert automatic.complete_plan(Stack(FlatBlock), given, 2) is given
    assert find_plan(CASES["Llama"].make()).plan is None
