"""Sharded models: preparing again, copying, the meta device, number formats, and optimizers on shards."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from headway import ShardingOptions, init_empty_weights
from headway.core.strategies.fully_sharded import fsdp_state
from headway.core.strategies.fully_sharded.dtensors import get_local_shard
from headway.core.strategies.fully_sharded.units import find_units
from headway.core.strategies.fully_sharded.values import fill_model
from headway.core.weights.pieces import is_dtensor
from headway.errors import HeadwayError, PrepareError, StateError, UnsupportedError
from tests.distributed.layouts import (
    GPT,
    build_seeded,
    gather_weights,
    gpt2,
    llama,
    make_tokens,
    mean_square,
    measure_norm,
    run_each,
    start_fsdp,
)
from tests.distributed.ranks import run_ranks

# ---------------------------------------------------------------- preparing again, copies, methods


def prepare_again() -> None:
    accelerator = start_fsdp()
    model, optimizer = accelerator.prepare(model := build_seeded(0, GPT), torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(mean_square(model, make_tokens()))
    optimizer.step()
    before = gather_weights(model)
    accelerator.free_memory()
    assert type(model).__name__ == "FSDPGPT"
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert all(torch.equal(value, before[name]) for name, value in gather_weights(model).items())
    optimizer.zero_grad()
    accelerator.backward(mean_square(model, make_tokens()))
    assert measure_norm(accelerator, model) > 0
    accelerator.free_memory()
    with pytest.raises(PrepareError, match="already sharded in another way"):
        start_fsdp(kwargs_handlers=[ShardingOptions(reshard_after_forward=False)]).prepare(model)


def copy_model() -> None:
    accelerator = start_fsdp()
    model = accelerator.prepare(build_seeded(0, GPT))
    for copier in (copy.deepcopy, torch.optim.swa_utils.AveragedModel):
        with pytest.raises(UnsupportedError, match="cannot be copied"):
            copier(model)
    # an average of the shards needs no copy of the model
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        average[name].lerp_(parameter.detach(), 0.5)
    accelerator.free_memory()


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(4, 2)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.head.bias.sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x)


def call_other_methods() -> None:
    accelerator = start_fsdp(kwargs_handlers=[ShardingOptions(forward_methods=("encode",))])
    model, plain, x = accelerator.prepare(build_seeded(0, Encoder)), build_seeded(0, Encoder), torch.ones(2, 4)
    torch.testing.assert_close(model.encode(x), plain.encode(x))
    accelerator.backward(model.encode(x).sum())
    plain.encode(x).sum().backward()
    torch.testing.assert_close(model.head.bias.grad.full_tensor(), plain.head.bias.grad)
    accelerator.free_memory()
    with pytest.raises(PrepareError, match="forward_methods"):
        start_fsdp(kwargs_handlers=[ShardingOptions(forward_methods=("encodes",))]).prepare(build_seeded(0, Encoder))


def keep_gradients_local() -> None:
    accelerator = start_fsdp()
    model = accelerator.prepare(build_seeded(0, GPT))
    with pytest.raises(HeadwayError, match="local SGD"), accelerator.strategy.keep_local(model):
        pass
    accelerator.free_memory()


def compare_optimizers() -> None:
    """Check that optimizers that support shards make the same steps as on one process."""
    kinds: dict[str, Any] = {
        "foreach": lambda ps: torch.optim.AdamW(ps, lr=0.1, foreach=True),
        "fused": lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True),
        "nesterov": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
        "muon": lambda ps: torch.optim.Muon([p for p in ps if p.ndim == 2], lr=0.1),
    }
    accelerator = start_fsdp()
    for kind, make in kinds.items():
        plain = build_seeded(0, GPT)
        by_hand = make(list(plain.parameters()))
        model, optimizer = accelerator.prepare(model := build_seeded(0, GPT), make(list(model.parameters())))
        for seed in (1, 2):
            with accelerator.accumulate(model):
                accelerator.backward(mean_square(model, make_tokens(seed)))
                optimizer.step()
                optimizer.zero_grad()
            mean_square(plain, make_tokens(seed)).backward()
            by_hand.step()
            by_hand.zero_grad()
        found, expected = mean_square(model, make_tokens()), mean_square(plain, make_tokens())
        assert found.item() == pytest.approx(expected.item(), rel=1e-2 if kind == "muon" else 1e-5), kind
        accelerator.free_memory()
    accelerator = start_fsdp(kwargs_handlers=[ShardingOptions(whole_updates=False)])
    with pytest.raises(UnsupportedError, match=r"Adafactor cannot train a sharded model.*AdamW"):
        accelerator.prepare(model := GPT(), torch.optim.Adafactor(model.parameters()))


def overflow_with_fp16_on_one_rank() -> None:
    """An fp16 overflow in one rank's shard skips the update on all ranks, and reduces the scale on all."""
    accelerator = start_fsdp(mixed_precision="fp16")
    model, optimizer = accelerator.prepare(model := build_seeded(0, GPT), torch.optim.SGD(model.parameters(), lr=0.1))
    skipped = []
    for step in range(3):
        accelerator.backward(mean_square(model, make_tokens()))
        if step == 1 and accelerator.process_index == 1:
            get_local_shard(dict(model.named_parameters())["norm.weight"].grad).fill_(float("inf"))  # type: ignore[arg-type]
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(optimizer.step_was_skipped)
    assert skipped == [False, True, False]
    accelerator.precision.update_scale()
    assert accelerator.precision.get_gradient_scale() == 32768.0
    assert all(bool(torch.isfinite(tensor).all()) for tensor in gather_weights(model).values())
    accelerator.free_memory()


def gather_in_bf16() -> None:
    """Check that parameters are gathered in bf16 and kept in float32, and that a wrong gathered dtype is an error."""
    accelerator = start_fsdp(mixed_precision="bf16")
    model, optimizer = accelerator.prepare(model := build_seeded(0, GPT), torch.optim.SGD(model.parameters(), lr=0.1))
    gathered_in: dict[str, torch.dtype] = {}
    model.blocks[0].up.register_forward_pre_hook(lambda linear, args: gathered_in.update(linear=linear.weight.dtype))
    model.blocks[0].first.register_forward_pre_hook(
        lambda norm, args: gathered_in.update(norm=norm.weight.dtype, stream=args[0].dtype)
    )
    accelerator.backward(mean_square(model, make_tokens()))
    assert gathered_in == {"linear": torch.bfloat16, "norm": torch.float32, "stream": torch.float32}
    assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}  # type: ignore[union-attr]
    record = next(r for r in fsdp_state.iterate_records(model) if r._param_fqn == "blocks.0.up.weight")
    record.mp_policy = type(record.mp_policy)(param_dtype=torch.float16)
    with pytest.raises(
        StateError, match=r"blocks.0.up.weight of GPT: the gathered parameter is bfloat16 instead of float16"
    ):
        optimizer.step()
    accelerator.free_memory()
    accelerator = start_fsdp(kwargs_handlers=[ShardingOptions(param_dtype="bf16", output_dtype="float32")])
    model = accelerator.prepare(build_seeded(0, GPT))
    assert model(make_tokens()).dtype == torch.float32
    assert model.tokens.weight.dtype == torch.float32 or not is_dtensor(model.tokens.weight)
    accelerator.free_memory()


# ---------------------------------------------------------------- models on the meta device


class NormBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def prepare_meta_models() -> None:
    accelerator = start_fsdp()
    with torch.device("meta"):
        model = GPT()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(accelerator.process_index)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert model.tokens.weight is model.head.weight
    found = gather_weights(model)
    assert float(found["tokens.weight"].std()) == pytest.approx(1.0, abs=0.1)
    assert torch.equal(found["norm.weight"], torch.ones(16))
    everywhere = accelerator.strategy.everyone.gather_objects({n: t.double().sum().item() for n, t in found.items()})
    assert everywhere[0] == everywhere[1]
    accelerator.backward(mean_square(model, make_tokens()))
    optimizer.step()
    accelerator.free_memory()
    # Each unit is initialized as it would be alone, in the order of modules.
    with init_empty_weights():
        model = NormBlocks()
    torch.manual_seed(3)
    model = accelerator.prepare(model)
    torch.manual_seed(3)
    for index, block in enumerate(model.blocks):
        expected = nn.Linear(64, 64)
        torch.testing.assert_close(block[0].weight.full_tensor(), expected.weight.detach(), msg=str(index))
    accelerator.free_memory()
    # Values that exist already are replaced by those of rank 0, too.
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(3, 3))
    model.register_buffer("scale", torch.full((2,), 1.0 + accelerator.process_index))
    assert accelerator.prepare(model).scale.tolist() == [1.0, 1.0]
    accelerator.free_memory()
    # A rank holds one whole unit at a time, besides its shards.
    with torch.device("meta"):
        model = NormBlocks()
    units = find_units(model, ShardingOptions())
    inner = accelerator.strategy.sharder._unit_sharder.shard_units(model, units)  # type: ignore[attr-defined]
    largest = fill_model(model, inner, torch.device("cpu"), accelerator.collectives)
    assert largest == 64 * 67 * 4
    assert largest * 6 == sum(p.numel() * p.element_size() for p in model.parameters())
    accelerator.free_memory()


class Uninitializable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


def prepare_transformers_models() -> None:
    """Check that models on the meta device use their own `_init_weights`, and that `generate` matches one process."""
    accelerator = start_fsdp()
    for make in (lambda: llama(tied=True), gpt2):
        with torch.device("meta"):
            model = make()
        found, expected = gather_weights(accelerator.prepare(model)), build_seeded(0, make).state_dict()
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert float(found[name].std()) == pytest.approx(float(value.std()), abs=0.004), name
            assert float(found[name].mean()) == pytest.approx(float(value.mean()), abs=0.006), name
        assert bool(torch.isfinite(model(make_tokens()).logits).all())
        accelerator.free_memory()
    model, plain = accelerator.prepare(build_seeded(0, llama)).eval(), build_seeded(0, llama).eval()
    how = {"max_new_tokens": 5, "do_sample": False, "use_cache": False}
    assert torch.equal(model.generate(make_tokens()[:, :4], **how), plain.generate(make_tokens()[:, :4], **how))
    accelerator.free_memory()


def generate_with_encoder_decoder_models() -> None:
    """Check `generate` of encoder-decoder models, before the first forward and between updates."""
    for make in (t5, whisper):
        accelerator = start_fsdp()
        model, plain = build_seeded(0, make), build_seeded(0, make)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
        prepared, optimizer = accelerator.prepare(model, optimizers[0])
        torch.manual_seed(0)
        given = {"input_ids": torch.randint(3, 32, (2, 6))} if make is t5 else {"input_features": torch.randn(2, 4, 20)}
        labels = torch.randint(3, 32, (2, 5))
        how = {"max_new_tokens": 5, "do_sample": False}
        for _ in range(3):
            assert torch.equal(prepared.eval().generate(**given, **how), plain.eval().generate(**given, **how))
            accelerator.backward(prepared.train()(**given, labels=labels).loss)
            plain.train()(**given, labels=labels).loss.backward()
            for each in (optimizer, optimizers[1]):
                each.step()
                each.zero_grad()
        weights = gather_weights(prepared)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6)
        accelerator.free_memory()


class Captioner(nn.Module):
    """Model with its own `generate`, which calls that of the model in it."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(3, 1)
        self.decoder = llama()

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.decoder(inputs_embeds=self.embed(features), labels=labels)

    def embed(self, features: torch.Tensor) -> torch.Tensor:
        tokens = torch.arange(features.shape[1]).repeat(len(features), 1)
        return self.decoder.get_input_embeddings()(tokens) + self.project(features)

    def generate(self, features: torch.Tensor, **options: Any) -> torch.Tensor:
        return self.decoder.generate(inputs_embeds=self.embed(features), **options)


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama(), LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))


def prompt_tuning() -> nn.Module:
    from peft import PromptTuningConfig, get_peft_model

    return get_peft_model(llama(), PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))


def generate_with_models_in_models() -> None:
    """Check `generate` of models that call `generate` of a model in them, before the first forward and between updates."""
    pytest.importorskip("peft")
    for make in (Captioner, lora, prompt_tuning):
        accelerator = start_fsdp()
        model, plain = build_seeded(0, make), build_seeded(0, make)
        optimizers = [
            torch.optim.SGD([each for each in one.parameters() if each.requires_grad], lr=0.1) for one in (model, plain)
        ]
        prepared, optimizer = accelerator.prepare(model, optimizers[0])
        torch.manual_seed(0)
        given = {"features": torch.randn(2, 6, 3)} if make is Captioner else {"input_ids": torch.randint(3, 32, (2, 6))}
        labels = torch.randint(3, 32, (2, 6))
        how = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        for _ in range(3):
            with torch.no_grad():
                assert torch.equal(prepared.eval().generate(**given, **how), plain.eval().generate(**given, **how)), (
                    make
                )
            accelerator.backward(prepared.train()(**given, labels=labels).loss)
            plain.train()(**given, labels=labels).loss.backward()
            for each in (optimizer, optimizers[1]):
                each.step()
                each.zero_grad()
        weights = gather_weights(prepared)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6)
        accelerator.free_memory()


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=32,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=2,
            decoder_start_token_id=0,
            dropout_rate=0.0,
        )
    )


def whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=32, num_mel_bins=4, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_source_positions=10,
        max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, dropout=0.0,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    return WhisperForConditionalGeneration(config)


def reject_meta_models() -> None:
    accelerator = start_fsdp()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), Uninitializable())
    with pytest.raises(PrepareError, match=r"cannot initialize themselves: 1\. .*reset_parameters"):
        accelerator.prepare(model)
    with pytest.raises(PrepareError, match=r"was passed for evaluation, but is on the meta device"):
        accelerator.prepare_model(nn.Linear(3, 3, device="meta"), evaluation_mode=True)
    with torch.device("cpu" if accelerator.process_index else "meta"):
        model = nn.Linear(3, 3)
    with pytest.raises(PrepareError, match="on ranks 0 only"):
        accelerator.prepare(model)


GROUPS = {
    "formats": (compare_optimizers, overflow_with_fp16_on_one_rank, gather_in_bf16),
    "models": (prepare_again, copy_model, call_other_methods, keep_gradients_local, prepare_meta_models,
               prepare_transformers_models, generate_with_encoder_decoder_models,
               generate_with_models_in_models, reject_meta_models),
}  # fmt: skip


def run_group(group: str, only: str = "") -> list[str]:
    return run_each(GROUPS[group], only)


@pytest.mark.parametrize("group", GROUPS)
def test_sharded_model_scenarios(group):
    for failed in run_ranks(run_group, 2, group):
        assert not failed, failed[0]
