"""Expert parallelism compared with the hand-written loop on one process; checkpoints, plans and errors."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headway import Accelerator, ActivationCheckpointing, ShardingOptions
from headway.core.weights.pieces import is_dtensor
from headway.errors import HeadwayError, PrepareError
from headway.planning.plan import plan
from tests.devices import ON_CPU
from tests.distributed import layouts
from tests.distributed.layouts import (
    VOCABULARY,
    Curve,
    Task,
    build_model,
    make_tokens,
    measure_differences,
    train_by_hand,
    train_prepared,
)
from tests.distributed.ranks import run_ranks
from tests.distributed.test_plan import compute_loss, measure_rank, sgd

CLOSE = 1e-6
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "use_cache": False, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip


def mixtral(num_experts: int = 4, **others: int) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(num_local_experts=num_experts, num_experts_per_tok=2, **SIZES | others)  # type: ignore[arg-type]
    )


def wide_mixtral() -> nn.Module:
    """Return a Mixtral whose shards have the strides that grouped matrix products need."""
    return mixtral(intermediate_size=32)


def qwen() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=8, head_dim=8, **SIZES)
    return Qwen3MoeForCausalLM(config)


def olmoe() -> nn.Module:
    from transformers import OlmoeConfig, OlmoeForCausalLM

    return OlmoeForCausalLM(OlmoeConfig(num_experts=4, num_experts_per_tok=2, **SIZES))


def deepseek(is_lonely: bool = False) -> nn.Module:
    """Return DeepSeek-V3 with a dense block and one with shared experts and grouped gates.

    Args:
        is_lonely: Whether all tokens go to the first two of eight experts.
    """
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2, n_group=4, topk_group=2, moe_intermediate_size=8,
        first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, **SIZES,
    )  # fmt: skip
    model = DeepseekV3ForCausalLM(config)
    if is_lonely:
        model.model.layers[1].mlp.gate.e_score_correction_bias[:2] = 10.0
    return model


def run_experts_in_a_loop(model: nn.Module) -> nn.Module:
    """Run the experts one after another, only those with tokens, instead of in one grouped product."""
    model.set_experts_implementation("eager")  # type: ignore[operator]
    return model


layouts.MODELS.update({
    "mixtral": mixtral, "qwen": qwen, "olmoe": olmoe, "deepseek": deepseek, "lonely": lambda: deepseek(is_lonely=True),
    "lonely, in a loop": lambda: run_experts_in_a_loop(deepseek(is_lonely=True)), "three experts": lambda: mixtral(3),
})  # fmt: skip

FOUR = {name: Task(name, optimizer="sgd", updates=5) for name in ("mixtral", "qwen", "olmoe", "deepseek")}
"""The fifth window is short: one rank has no rows of its own, but receives tokens of others."""
TABLE: dict[str, tuple[int, str, dict[str, Task]]] = {
    "ep x2": (2, "ep", {
        **FOUR,
        "experts without tokens": Task("lonely", optimizer="sgd", updates=5),
        "the same in a loop": Task("lonely, in a loop", optimizer="sgd", updates=5),
        "computed again": Task("mixtral", optimizer="sgd", updates=3, handlers=(ActivationCheckpointing(),)),
        "units by class": Task("qwen", optimizer="sgd", updates=3, handlers=(ShardingOptions(units=("Qwen3MoeExperts",)),)),
        "parameters kept": Task("olmoe", optimizer="sgd", updates=3, handlers=(ShardingOptions(reshard_after_forward=False),)),
        "compiled": Task("mixtral", optimizer="sgd", updates=2, options={"dynamo_backend": "aot_eager"}),
        "host memory": Task("mixtral", optimizer="sgd", updates=3, handlers=(ShardingOptions(cpu_offload=True),)),
    }),
    "fsdp+ep x4": (4, "fsdp+ep=2", {**FOUR, "experts without tokens": Task("lonely", optimizer="sgd", updates=5)}),
    "ep+tp x4": (4, "ep=2+tp=2", {
        **FOUR,
        "experts without tokens": Task("lonely", optimizer="sgd", updates=5),
        "the same in a loop": Task("lonely, in a loop", optimizer="sgd", updates=5),
        "computed again": Task("mixtral", optimizer="sgd", updates=3, handlers=(ActivationCheckpointing(),)),
    }),
    "ddp+ep x4": (4, "ddp+ep=2", {"qwen": FOUR["qwen"]}),
    "ep x4": (4, "ep", {"deepseek": FOUR["deepseek"]}),
    "fsdp+ep+tp x8": (8, "fsdp=2+ep=2+tp=2", {
        **FOUR,
        "experts without tokens": Task("lonely", optimizer="sgd", updates=5),
        "computed again": Task("mixtral", optimizer="sgd", updates=3, handlers=(ActivationCheckpointing(),)),
    }),
    "cp+ep x4": (4, "cp=2+ep=2", {
        **FOUR,
        "experts without tokens": Task("lonely", optimizer="sgd", updates=5),
        "computed again": Task("mixtral", optimizer="sgd", updates=3, handlers=(ActivationCheckpointing(),)),
    }),
    "fsdp+cp+ep x8": (8, "fsdp=2+cp=2+ep=2", {"mixtral": FOUR["mixtral"]}),
    "ddp+cp+ep x8": (8, "ddp=2+cp=2+ep=2", {"olmoe": FOUR["olmoe"]}),
    "cp+ep+tp x8": (8, "cp=2+ep=2+tp=2", {"qwen": FOUR["qwen"], "deepseek": FOUR["deepseek"]}),
    "ddp+ep+tp x8": (8, "ddp=2+ep=2+tp=2", {"deepseek": FOUR["deepseek"]}),
    "hsdp+ep x8": (8, "ddp=2+fsdp=2+ep=2", {"mixtral": Task("mixtral", optimizer="sgd", updates=5, window=16)}),
}  # fmt: skip


def train_tasks(tasks: list[Task], layout: str) -> list[Curve]:
    return [train_prepared(task, layout) for task in tasks]


@pytest.mark.parametrize(
    "row",
    ["ep x2", "fsdp+ep x4", "ep+tp x4", *(pytest.param(row, marks=pytest.mark.matrix) for row in list(TABLE)[3:])],
)
def test_training_matches_the_hand_written_loop(row):
    num_ranks, layout, tasks = TABLE[row]
    per_rank = run_ranks(train_tasks, num_ranks, list(tasks.values()), layout, timeout=300)
    for number, (name, task) in enumerate(tasks.items()):
        for rank, curves in enumerate(per_rank):
            found = measure_differences(train_by_hand(task), curves[number])
            assert max(found.values()) < CLOSE, (name, rank, found)


def test_adamw_and_bf16_match_whole_models():
    """AdamW's groups hold parameters of two meshes. bf16 differs from float32 as much as on whole models."""
    tasks = [Task("mixtral", "adamw", updates=4), Task("mixtral", "fused", updates=4)]
    half = Task("mixtral", "sgd", updates=4, precision="bf16")
    distributed = run_ranks(train_tasks, 2, [*tasks, half], "ep", timeout=200)[0]
    whole = run_ranks(train_tasks, 2, [half], "ddp", timeout=200)[0]
    for task, curve in zip(tasks, distributed):
        assert measure_differences(train_by_hand(task), curve)["losses"] < CLOSE
    assert measure_differences(whole[0], distributed[2])["losses"] < 1e-3
    assert measure_differences(train_by_hand(half), distributed[2])["losses"] > 1e-5


def make_balanced(num_parts: int) -> list[nn.Module]:
    torch.manual_seed(0)
    made = mixtral()
    made.config.output_router_logits, made.router_aux_loss_coef = True, 0.5  # type: ignore[union-attr]
    return [made, *make_tokens(seed=5, rows=8).chunk(num_parts)]  # type: ignore[list-item]


def measure_losses(layout: str) -> tuple[float, float, float]:
    """Return the total loss, the router's auxiliary loss and the gradient norm."""
    accelerator = Accelerator(cpu=ON_CPU, strategy=layout)
    shard = accelerator.strategy.data_shard
    made, *parts = make_balanced(shard.count)
    model: Any = accelerator.prepare(made)
    found = model(input_ids=parts[shard.index], labels=parts[shard.index])
    accelerator.backward(found.loss)
    norm = float(accelerator.clip_grad_norm_(model.parameters(), 1e9))
    both = accelerator.strategy.data_group.reduce_numbers([found.loss.item(), found.aux_loss.item()])
    accelerator.end_training()
    return both[0] / shard.count, both[1] / shard.count, norm


@pytest.mark.parametrize(("layout", "num_ranks"), [("ep", 2), ("ep=2+tp=2", 4)])
def test_router_loss_uses_each_ranks_tokens(layout, num_ranks):
    model: Any
    model, *parts = make_balanced(2)
    found = [model(input_ids=part, labels=part) for part in parts]
    (sum(each.loss for each in found) / 2).backward()
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    expected = [sum(each[key].item() for each in found) / 2 for key in ("loss", "aux_loss")]
    for measured in run_ranks(measure_losses, num_ranks, layout):
        assert measured == pytest.approx((*expected, norm), rel=CLOSE)


# ---------------------------------------------------------------- checkpoints


def train_and_save(layout: str, folder: Path, begin: int, end: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train from update `begin`, which continues from a checkpoint if above 0. Save a checkpoint and whole weights."""
    accelerator = Accelerator(cpu=ON_CPU, strategy=layout, project_dir=folder)
    model = build_model(Task("deepseek"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    if begin:
        accelerator.load_state(str(folder / "state"))
    losses = []
    for step in range(begin, end):
        loss = model(make_tokens(seed=step, rows=4)).logits.float().square().mean()  # the same rows on every rank
        losses.append(loss.item())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if not begin:
        accelerator.save_state(str(folder / "state"))
    accelerator.save_model(model, str(folder / f"whole {begin}"))
    whole = accelerator.get_state_dict(model)
    accelerator.end_training()
    return losses, whole


NUM_RANKS = {"ddp": 2, "fsdp": 2, "ep": 2, "fsdp+ep=2": 4, "ep=2+tp=2": 4, "cp=2+ep=2": 4, "fsdp=2+ep=2+tp=2": 8}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("ep", "ep"), ("ep", "fsdp"), ("ddp", "ep"), ("fsdp+ep=2", "ep"), ("ep", "fsdp+ep=2"),
        ("ep=2+tp=2", "fsdp"), ("ddp", "ep=2+tp=2"), ("fsdp=2+ep=2+tp=2", "ep=2+tp=2"), ("fsdp+ep=2", "fsdp=2+ep=2+tp=2"),
        ("cp=2+ep=2", "ep"), ("fsdp+ep=2", "cp=2+ep=2"),
    ],
)  # fmt: skip
def test_checkpoints_load_in_other_layouts(tmp_path, before, after):
    from safetensors.torch import load_file

    straight = run_ranks(train_and_save, 1, "ddp", tmp_path / "one", 0, 4)[0]
    first = run_ranks(train_and_save, NUM_RANKS[before], before, tmp_path, 0, 2)[0]
    second = run_ranks(train_and_save, NUM_RANKS[after], after, tmp_path, 2, 4)[0]
    assert [*first[0], *second[0]] == pytest.approx(straight[0], abs=CLOSE)
    assert max(float((second[1][name] - tensor).abs().max()) for name, tensor in straight[1].items()) < CLOSE
    written = load_file(tmp_path / "whole 2" / "model.safetensors")
    assert any(".experts.gate_up_proj" in name for name in written)
    assert all(torch.equal(tensor, second[1][name]) for name, tensor in written.items())


# ---------------------------------------------------------------- memory, plans and errors


def measure_experts() -> tuple[int, int, list[int]]:
    accelerator = Accelerator(cpu=ON_CPU, strategy="ep")
    model = accelerator.prepare(build_model(Task("mixtral")))
    experts: Any = accelerator.unwrap_model(model).model.layers[0].mlp.experts
    local = experts.gate_up_proj._local_tensor if is_dtensor(experts.gate_up_proj) else experts.gate_up_proj
    found = local.numel(), experts.gate_up_proj.numel(), list(local.shape)
    accelerator.end_training()
    return found


def test_rank_holds_only_its_experts():
    for local, whole, shape in run_ranks(measure_experts, 2):
        assert local * 2 == whole
        assert shape == [2, 48, 16]


@pytest.mark.parametrize(
    ("layout", "num_ranks"), [("ep", 2), ("fsdp+ep=2", 4), ("ep=2+tp=2", 4), ("cp=2+ep=2", 4), ("fsdp=2+ep=2+tp=2", 8)]
)
def test_plan_counts_held_parameters_and_exchanges(layout, num_ranks):
    planned = plan(wide_mixtral, layout, num_ranks, step=compute_loss, optimizer=sgd)
    for rank, (trial, (weights, gradients, _)) in enumerate(
        run_ranks(measure_rank, num_ranks, wide_mixtral, layout, "no", sgd)
    ):
        share = planned.shares.get_share(rank)
        assert weights == share.weights - share.padding - trial.buffers, rank
        assert gradients == share.gradients - share.padding, rank
        assert planned.exchanges.keys() == trial.volumes.keys()
        for exchange, volume in planned.exchanges.items():
            if exchange.kind != "all_to_all":
                assert trial.volumes[exchange] == volume
            elif exchange.phase == "backward":  # in forward, the ranks also exchange counts
                assert trial.volumes[exchange].calls == volume.calls == 2 * 2
                # All tokens are alike: their two experts are on one rank or on two.
                assert 0 < trial.volumes[exchange].num_bytes <= num_ranks * volume.num_bytes


class OldExperts(nn.Module):
    """Experts as separate modules, as in transformers before version 5."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        return sum(expert(x) for expert in self.experts)  # type: ignore[return-value]


REJECTED: dict[str, tuple[str, Callable[[], nn.Module], dict[str, Any], str]] = {
    "modules": ("ep", OldExperts, {}, r"no experts that ep=2 could distribute.*Leave ep out"),
    "dense": ("ep", lambda: build_model(Task("llama")), {}, r"no experts that ep=2 could distribute"),
    "uneven": ("ep", lambda: build_model(Task("three experts")), {}, r"3 experts, which cannot be divided among 2.*divisor of 3"),
    "pieces": ("ep", mixtral, {"microbatching": "auto"}, r"does not work with ep"),
    "fp8": ("ep", mixtral, {"mixed_precision": "fp8"}, r"does not support expert parallelism \(ep\)"),
}  # fmt: skip


def get_errors() -> dict[str, str]:
    errors = {}
    for name, (layout, make, options, _) in REJECTED.items():
        try:
            accelerator = Accelerator(cpu=ON_CPU, strategy=layout, **options)
            accelerator.prepare(make())
            errors[name] = "served"
        except HeadwayError as error:
            errors[name] = str(error)
    return errors


def call_with_wrong_arguments() -> None:
    accelerator = Accelerator(cpu=ON_CPU, strategy="ep")
    model = accelerator.prepare(mixtral())
    experts, x, index = accelerator.unwrap_model(model).model.layers[0].mlp.experts, torch.ones(2, 16), torch.ones(2, 2)
    for given in ((x, index, index), (x, index.long(), torch.ones(2, 4)), (x[None], index.long(), index)):
        with pytest.raises(PrepareError, match=r"called with tensors of the shapes .* in this order"):
            experts(*given)
    expected = experts(x, index.long(), index)
    assert torch.equal(experts(top_k_weights=index, top_k_index=index.long(), hidden_states=x), expected)
    accelerator.end_training()


def test_experts_reject_other_arguments():
    run_ranks(call_with_wrong_arguments, 2)


def test_unsupported_models_and_options_raise_errors():
    for errors in run_ranks(get_errors, 2):
        for name, (_, _, _, expected) in REJECTED.items():
            assert re.search(expected, errors[name], re.DOTALL), (name, errors[name])


def compute_first_loss(strategy: str) -> float:
    accelerator = Accelerator(cpu=True, strategy=strategy)
    with torch.device("meta"):
        model = mixtral()
    torch.manual_seed(0)
    model = accelerator.prepare(model)
    ids = torch.arange(24).reshape(2, 12) % VOCABULARY
    found = model(input_ids=ids, labels=ids).loss
    accelerator.backward(found)
    return float(found.detach())


def test_model_on_meta_device_starts_like_fsdp() -> None:
    (expected, _), found, four = (
        run_ranks(compute_first_loss, n, s) for n, s in ((2, "fsdp"), (2, "ep"), (4, "fsdp+ep=2"))
    )
    assert [*found, *four] == pytest.approx([expected] * 6, rel=1e-6)
