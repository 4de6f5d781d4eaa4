"""Tensor parallelism compared with plain PyTorch on one process: training, tied weights, dropout, generation and other plans."""

import zlib
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from headway import Accelerator, ActivationCheckpointing, TensorParallelOptions
from headway.core.strategies.fully_sharded import dtensors
from headway.core.strategies.fully_sharded.dtensors import get_local_shard
from headway.core.weights.pieces import is_dtensor
from headway.errors import DataError, PrepareError
from headway.layouts.tensor.tensor_parallel import TensorParallel
from tests.devices import ON_CPU
from tests.distributed import cut_models, layouts
from tests.distributed.cut_models import GPT, GPT_PLAN
from tests.distributed.layouts import VOCABULARY, Task, measure_differences, train_by_hand
from tests.distributed.ranks import RankFailed, run_ranks

DEFAULT = TensorParallelOptions()
WITH_PLAN = TensorParallelOptions(GPT_PLAN)
MODELS: dict[str, Any] = {
    "mixtral": lambda: mixtral(),
    "gpt, cut": lambda: GPT(VOCABULARY),
    "llama, cut": lambda: cut_models.llama(vocab_size=VOCABULARY, use_cache=False),
    "llama, four heads": lambda: cut_models.llama(vocab_size=VOCABULARY, use_cache=False, num_key_value_heads=4),
}
TABLE = {
    "gpt on two": ("tp", 2, Task("gpt, cut", optimizer="fused", handlers=(WITH_PLAN,))),
    "gpt on four, recomputed": (
        "tp", 4, Task("gpt, cut", handlers=(replace(WITH_PLAN, sequence_parallel=True), ActivationCheckpointing())),
    ),
    "llama on two, its own plan": ("tp", 2, Task("llama, cut", handlers=(DEFAULT,), seed_by_rank=True)),
    "llama on four, sequences and loss": (
        "tp", 4, Task("llama, four heads", handlers=(replace(DEFAULT, sequence_parallel=True, loss_parallel=True),)),
    ),
    "gpt, sharded and cut": ("fsdp+tp=2", 4, Task("gpt, cut", optimizer="fused", handlers=(WITH_PLAN,))),
    "llama, sharded and cut, sequences": (
        "fsdp+tp=2", 4, Task("llama, cut", handlers=(replace(DEFAULT, sequence_parallel=True), ActivationCheckpointing())),
    ),
    "gpt, sharded and cut and compiled": (
        "fsdp+tp=2", 4, Task("gpt, cut", updates=3, handlers=(WITH_PLAN,), options={"dynamo_backend": "aot_eager"}),
    ),
    "mixtral, sharded and cut": ("fsdp+tp=2", 4, Task("mixtral", updates=3, handlers=(DEFAULT,))),
    "gpt, copied and cut, loss": ("ddp=2+tp=2", 4, Task("gpt, cut", handlers=(replace(WITH_PLAN, loss_parallel=True),))),
}  # fmt: skip


def gather(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined,no-any-return]


def compute_checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(get_local_shard(tensor).detach().contiguous().cpu().numpy().tobytes())


def train_prepared(task: Task, layout: str) -> dict[str, Any]:
    """Train the prepared model. Return the curve, and this rank's checksums of the parameters that the plan does not split."""
    layouts.MODELS.update(MODELS)
    kept: list[nn.Module] = []
    layouts.MODELS[task.model] = lambda: kept.append(MODELS[task.model]()) or kept[-1]  # type: ignore[func-returns-value]
    curve = layouts.train_prepared(task, layout)
    whole = {n: compute_checksum(p) for n, p in kept[0].named_parameters() if p.placements[-1].is_replicate()}  # type: ignore[attr-defined]
    return {**curve, "whole": whole}


@pytest.mark.on_device
@pytest.mark.parametrize("name", TABLE)
def test_split_model_matches_a_whole_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trains eight updates by default: ragged windows of two micro-batches, weighted by tokens and clipped."""
    if not ON_CPU and "mixtral" in name:
        pytest.skip("the simulated device uses CPU kernels, which have no histogram of integers")
    layout, num_ranks, task = TABLE[name]
    for model, make in MODELS.items():
        monkeypatch.setitem(layouts.MODELS, model, make)
    expected = train_by_hand(replace(task, handlers=()))
    found = run_ranks(train_prepared, num_ranks, task, layout, timeout=240)
    for rank in found:
        off = measure_differences(expected, rank)
        assert max(off["losses"], off["norms"], off["weights"] / 10) < 2e-6, off
    # Neighbors along tp, the innermost axis, must hold exactly equal copies of unsplit parameters.
    assert found[0]["whole"]
    assert all(found[i]["whole"] == found[i + 1]["whole"] for i in range(0, num_ranks, 2))


# ---------------------------------------------------------------- one split model, without the Accelerator


def make_mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def make_ids(rows: int = 3, length: int = 12) -> torch.Tensor:
    return torch.randint(0, 37, (rows, length), generator=torch.Generator().manual_seed(1))


def compute_gradients(model: nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    out = cut_models.compute_logits(model, tokens)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    (out * weights).mean().backward()
    return out.detach(), {name: gather(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def mixtral(**changes: Any) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    few: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": None, "use_cache": False,
    }  # fmt: skip
    return MixtralForCausalLM(MixtralConfig(**few, num_local_experts=4, **changes))


def make_transformers_models() -> dict[str, Any]:
    """Return transformers models whose plans use other styles: packed experts, norms within heads, latent keys, gathered outputs."""
    import transformers

    few: dict[str, Any] = {
        "vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": None, "use_cache": False,
    }  # fmt: skip
    latent = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
    experts = {
        "moe_intermediate_size": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    }
    t = transformers
    return {
        "mixtral": t.MixtralForCausalLM(t.MixtralConfig(**few, num_local_experts=4)),
        "qwen3": t.Qwen3ForCausalLM(t.Qwen3Config(**few, head_dim=4)),
        "phi3": t.Phi3ForCausalLM(t.Phi3Config(**few)),
        "olmo2": t.Olmo2ForCausalLM(t.Olmo2Config(**few)),
        "deepseek_v2": t.DeepseekV2ForCausalLM(
            t.DeepseekV2Config(**{**few, "num_key_value_heads": 4}, **latent, **experts, first_k_dense_replace=1)
        ),
    }  # fmt: skip


def measure_other_styles() -> dict[str, float]:
    found = {}
    names = list(make_transformers_models())
    for name in names:
        torch.manual_seed(0)
        whole = make_transformers_models()[name]
        torch.manual_seed(0)
        cut = make_transformers_models()[name]
        for seed, parameter in enumerate(zip(whole.parameters(), cut.parameters())):
            values = 0.2 * torch.randn(parameter[0].shape, generator=torch.Generator().manual_seed(seed))
            for each in parameter:
                each.data.copy_(values)
        TensorParallel(cut, make_mesh(), DEFAULT)
        (out, expected), (cut_out, grads) = compute_gradients(whole, make_ids()), compute_gradients(cut, make_ids())
        assert expected.keys() == grads.keys()
        largest = max(float(g.abs().max()) for g in expected.values())
        off = max(float((expected[n] - grads[n]).abs().max()) for n in expected) / largest
        found[name] = max(off, float((out - cut_out).abs().max() / out.abs().max()))
        states = {n: gather(p.detach()) for n, p in cut.named_parameters()}
        assert all(torch.equal(states[n], p) for n, p in whole.named_parameters()), name  # also packed parameters
        parts = {n: dtensors.shard_like(states[n], p.detach()) for n, p in cut.named_parameters()}
        assert all(torch.equal(get_local_shard(parts[n]), get_local_shard(p)) for n, p in cut.named_parameters()), name
    return found


def test_other_styles_of_transformers_match_whole_models() -> None:
    found = run_ranks(measure_other_styles, 2, timeout=240)[0]
    assert all(off < 5e-6 for off in found.values()), found


def generate_whole_and_split() -> list[tuple[list[int], list[int]]]:
    torch.manual_seed(0)
    whole = cut_models.llama(eos_token_id=None, pad_token_id=0).eval()
    torch.manual_seed(0)
    cut = cut_models.llama(eos_token_id=None, pad_token_id=0).eval()
    TensorParallel(cut, make_mesh(), replace(DEFAULT, loss_parallel=True))
    made = []
    for sampled in (False, True):
        pair = []
        for model in (whole, cut):
            torch.manual_seed(3)
            pair.append(model.generate(make_ids(2, 6), max_new_tokens=8, do_sample=sampled).flatten().tolist())
        made.append((pair[0], pair[1]))
    return made


def test_generation_yields_the_tokens_of_one_process() -> None:
    for ranks in run_ranks(generate_whole_and_split, 2, timeout=240):
        for whole, cut in ranks:
            assert whole == cut


def compare_tied_model() -> tuple[float, bool, float]:
    """Compare a model with tied weights. If only the head were split, as by torch itself, gradients would differ by 1e-2."""
    torch.manual_seed(0)
    whole = GPT()
    torch.manual_seed(0)
    cut = GPT()
    TensorParallel(cut, make_mesh(), WITH_PLAN)
    (_, expected), (_, grads) = compute_gradients(whole, make_ids()), compute_gradients(cut, make_ids())
    off = max(float((expected[n] - grads[n]).abs().max()) for n in expected)
    return off, cut.head.weight is cut.tokens.weight, len(grads) - len(expected)


def test_tied_weights_stay_tied() -> None:
    off, is_tied, more = run_ranks(compare_tied_model, 2, timeout=240)[0]
    assert off < 1e-6
    assert is_tied
    assert more == 0


def measure_torch_styles() -> float:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

    plan: dict[str, Any] = {
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "1": SequenceParallel(),
        "2": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "2.0": ColwiseParallel(),
        "2.2": RowwiseParallel(),
    }

    def build() -> nn.Module:
        torch.manual_seed(0)
        feed = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        model = nn.Sequential(nn.Embedding(38, 8), nn.LayerNorm(8), feed, nn.LayerNorm(8))
        nn.init.normal_(model[1].weight)
        return model

    whole, cut = build(), build()
    TensorParallel(cut, make_mesh(), TensorParallelOptions(plan))
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2, foreach=True) for m in (whole, cut)]
    off = 0.0
    for _ in range(3):
        for _ in range(2):
            (_, expected), (_, grads) = compute_gradients(whole, make_ids()), compute_gradients(cut, make_ids())
        off = max(off, max(float((expected[n] - grads[n]).abs().max()) for n in expected))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return off


def test_plans_of_torch_styles_match_whole_models() -> None:
    """Sequence-parallel norms need gradient sums over the ranks, even in windows with several backward passes."""
    assert run_ranks(measure_torch_styles, 2, timeout=240)[0] < 1e-6


# ---------------------------------------------------------------- random numbers


def run_with_dropout(sequence_parallel: bool) -> dict[str, Any]:
    options = replace(WITH_PLAN, sequence_parallel=sequence_parallel)
    torch.manual_seed(0)
    model = GPT(dropout=0.5)
    TensorParallel(model, make_mesh(), options)
    masks: dict[str, Any] = {}

    def record_mask(name: str) -> Any:
        def hook(module: nn.Module, args: Any, out: torch.Tensor) -> None:
            masks.setdefault(name, (out == 0).flatten().tolist())

        return hook

    model.blocks[0].drop.register_forward_hook(record_mask("residual"))
    model.blocks[0].drop_within.register_forward_hook(record_mask("within"))
    torch.manual_seed(5)
    out, grads = compute_gradients(model, make_ids())
    follows = torch.rand(2).tolist()
    model.zero_grad()
    # The same pass with every block recomputed in backward.
    for block in model.blocks:
        block.forward = lambda x, run=block.forward: checkpoint(run, x, use_reentrant=False)  # type: ignore[method-assign]
    torch.manual_seed(5)
    again, recomputed = compute_gradients(model, make_ids())
    is_alike = torch.equal(out, again) and all(torch.equal(recomputed[n], g) for n, g in grads.items())
    # A model without dropout does not change the RNG state.
    torch.manual_seed(0)
    without_dropout = GPT()
    TensorParallel(without_dropout, make_mesh(), options)
    torch.manual_seed(5)
    compute_gradients(without_dropout, make_ids())
    untouched = torch.rand(2).tolist()
    torch.manual_seed(5)
    return {
        "residual": masks["residual"], "within": masks["within"], "follows": follows, "out": compute_checksum(out),
        "is_alike": is_alike, "is_untouched": untouched == torch.rand(2).tolist(),
    }  # fmt: skip


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_is_equal_on_whole_activations_and_different_on_split_ones(
    sequence_parallel: bool,
) -> None:
    one, other = run_ranks(run_with_dropout, 2, sequence_parallel, timeout=240)
    assert one["out"] == other["out"]
    assert one["follows"] == other["follows"]
    assert one["is_alike"]
    assert other["is_alike"]
    assert one["is_untouched"]
    assert other["is_untouched"]
    assert one["within"] != other["within"]
    # Sequence parallelism splits the residual stream along the sequence. Otherwise, the stream is whole.
    assert (one["residual"] == other["residual"]) is not sequence_parallel


# ---------------------------------------------------------------- wrong use


class PartialModel(nn.Module):
    """Model in which an unsplit parameter acts on split activations, so that its gradients differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale, self.down = nn.Linear(8, 16), nn.PReLU(), nn.Linear(16, 8)
        self.head = nn.Linear(8, 37)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.scale(self.up(x))))


def train_partial_model(is_named: bool) -> float:
    plan = {"up": "colwise", "down": "rowwise", **({"scale": "replicated_with_grad_allreduce"} if is_named else {})}
    accelerator = Accelerator(cpu=ON_CPU, strategy="tp", kwargs_handlers=[TensorParallelOptions(plan)])
    torch.manual_seed(0)
    whole = PartialModel()
    torch.manual_seed(0)
    model = PartialModel()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(4, 8)
    whole(x).square().mean().backward()
    with accelerator.accumulate(model):
        accelerator.backward(model(x).square().mean())
        off = float((gather(model.scale.weight.grad) - whole.scale.weight.grad).abs())
        optimizer.step()
    accelerator.end_training()
    return off


def test_unsplit_parameter_on_split_activations_is_named_at_the_first_update() -> None:
    with pytest.raises(RankFailed, match=r"scale\.weight.*replicated_with_grad_allreduce"):
        run_ranks(train_partial_model, 2, False, timeout=240)
    assert run_ranks(train_partial_model, 2, True, timeout=240)[0] < 1e-7


def use_odd_sequence() -> None:
    model = GPT()
    TensorParallel(model, make_mesh(), replace(WITH_PLAN, sequence_parallel=True))
    with pytest.raises(DataError, match="length 11"):
        model(make_ids(length=11))
    assert is_dtensor(model.norm.weight)
    assert is_dtensor(model.blocks[0].attention.out.bias)
    model(make_ids())


def split_wrong_heads() -> None:
    model = cut_models.llama()
    before = {n: p.clone() for n, p in model.named_parameters()}
    with pytest.raises(PrepareError, match=r"num_key_value_heads|2 heads"):
        TensorParallel(model, make_mesh(), DEFAULT)
    assert all(torch.equal(p, before[n]) and not is_dtensor(p) for n, p in model.named_parameters())


def test_misfits_are_errors_before_anything_changes() -> None:
    run_ranks(use_odd_sequence, 2, timeout=240)
    run_ranks(split_wrong_heads, 4, timeout=240)


def train_lora(layout: str | None, **lora: Any) -> list[float]:
    """Return the losses of a Llama with LoRA adapters on all its matrices."""
    from peft import LoraConfig, get_peft_model

    accelerator = Accelerator(cpu=ON_CPU, strategy=layout)
    chosen = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False, **lora)
    torch.manual_seed(0)
    model = get_peft_model(cut_models.llama(), chosen)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for _ in range(3):
        loss = model(input_ids=make_ids(), labels=make_ids()).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_lora_variants() -> tuple[list[float], list[float], str]:
    plain, with_dropout = train_lora("tp"), train_lora("tp", lora_dropout=0.3)
    with pytest.raises(PrepareError, match=r"cannot split .*q_proj.*no plain LoRA .lora_magnitude_vector.") as error:
        train_lora("tp", use_dora=True)
    return plain, with_dropout, str(error.value)


def test_lora_adapters_match_those_of_a_whole_model() -> None:
    (expected,) = run_ranks(train_lora, 1, None)
    first, second = run_ranks(train_lora_variants, 2)
    assert first == second
    assert first[0] == pytest.approx(expected, rel=1e-5)
    assert first[1] != first[0]


def train_with_nan_of_weight_zero() -> tuple[bool, float]:
    """Train with a NaN loss of weight 0. Return whether all parameters are finite, and the gradient norm."""
    accelerator = Accelerator(cpu=ON_CPU, strategy="tp", gradient_accumulation_steps=2, kwargs_handlers=[WITH_PLAN])
    torch.manual_seed(0)
    model = GPT()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    norm = 0.0
    for is_filler in (False, True):
        with accelerator.accumulate(model):
            targets = make_ids().roll(-1, 1)
            loss = cross_entropy(model(make_ids()).flatten(0, 1), targets.flatten())
            accelerator.backward(loss * float("nan") if is_filler else loss, weight=0 if is_filler else 3)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1e9).item()
            optimizer.step()
    is_fine = all(bool(torch.isfinite(get_local_shard(p)).all()) for p in model.parameters())
    accelerator.end_training()
    return is_fine, norm


def test_nan_loss_of_weight_zero_has_no_effect() -> None:
    for is_fine, norm in run_ranks(train_with_nan_of_weight_zero, 2, timeout=240):
        assert is_fine
        assert 0 < norm < 1e3


def prepare_twice() -> list[float]:
    """Prepare a model with split logits twice, and return its losses. After `free_memory`, losses must still support split logits."""
    accelerator = Accelerator(cpu=ON_CPU, strategy="tp", kwargs_handlers=[replace(WITH_PLAN, loss_parallel=True)])
    torch.manual_seed(0)
    model, losses = GPT(), []
    for _ in range(2):
        model = accelerator.prepare(model)
        loss = cross_entropy(model(make_ids()).flatten(0, 1), make_ids().roll(-1, 1).flatten())
        accelerator.backward(loss)
        losses.append(gather(loss.detach()).item())
        accelerator.free_memory()
    accelerator.end_training()
    return losses


def test_model_with_a_split_head_can_be_prepared_again() -> None:
    for first, second in run_ranks(prepare_twice, 2, timeout=240):
        assert first == second
