"""Adapters with other features: tied embeddings, compilation, offloading, low-bit optimizers, other ranks, merging."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from headway import Accelerator, DistributedDataParallelKwargs, ProjectConfiguration, ShardingOptions
from headway.errors import UnsupportedError
from tests.distributed.low_bit import skip_compiler
from tests.distributed.ranks import run_ranks

peft = pytest.importorskip("peft")
from tests.distributed import adapters  # noqa: E402 - needs PEFT

Make = Callable[[], Any]


def make_lora(seed: int = 1, **more: Any) -> Any:
    return add_lora(adapters.make_base("llama"), seed, **more)


def add_lora(base: Any, seed: int = 1, r: int = 4, **more: Any) -> Any:
    torch.manual_seed(seed)
    model = peft.get_peft_model(
        base, peft.LoraConfig(r=r, lora_alpha=8, **adapters.make_target_options("llama"), **more)
    )
    adapters.randomize_adapters(model)
    return model


def make_tied(**more: Any) -> Any:
    """LoRA on a model whose output head is its embedding."""
    torch.manual_seed(0)
    config = adapters.make_base("llama").config
    config.tie_word_embeddings = True
    return add_lora(type(adapters.make_base("llama"))(config).double(), **more)


def compare(
    layout: str, make: Make, num_updates: int = adapters.NUM_UPDATES, **options: Any
) -> tuple[Accelerator, Any, Any]:
    """Train in a layout and by hand; check losses and parameters. Return the accelerator, its model and the plain one."""
    accelerator = adapters.make_accelerator(layout, **options)
    plain = make()
    expected = adapters.train_by_hand(plain, updates=range(num_updates))
    model, optimizer = adapters.prepare(accelerator, make())
    losses = adapters.train(accelerator, model, optimizer, range(num_updates))
    assert losses == pytest.approx(expected, abs=adapters.CLOSE), layout
    assert not find_differences(accelerator, model, plain), layout
    return accelerator, model, plain


def find_differences(accelerator: Accelerator, model: nn.Module, plain: nn.Module) -> list[str]:
    found = adapters.gather_parameters(accelerator, model)
    return adapters.find_differences(found, {n: p for n, p in plain.named_parameters() if n in found})


# -------------------------------------------------------------------- several adapters


def make_two(seed: int = 5) -> Any:
    model = make_lora()
    torch.manual_seed(seed)
    model.add_adapter("other", peft.LoraConfig(r=4, lora_alpha=8, **adapters.make_target_options("llama")))
    return model


def start_two(layout: str, model: Any) -> tuple[Accelerator, Any, Any]:
    options = [DistributedDataParallelKwargs(find_unused_parameters=True)] if layout == "ddp" else []
    accelerator = adapters.make_accelerator(layout, kwargs_handlers=options)
    lora = [parameter for name, parameter in model.named_parameters() if "lora_" in name]
    if layout == "ddp":  # which reduces what learns when it is prepared
        for parameter in lora:
            parameter.requires_grad_(True)
    model, optimizer = accelerator.prepare(model, adapters.make_optimizer(lora))
    return accelerator, model, optimizer


def switch_and_resume(layout: str, folder: str) -> None:
    """Two adapters learn by turns for 20 updates, with a resume in between."""
    plain, half = make_two(), adapters.NUM_UPDATES // 2
    by_hand = adapters.make_optimizer([each for name, each in plain.named_parameters() if "lora_" in name])
    accelerator, model, optimizer = start_two(layout, make_two())
    for number in range(adapters.NUM_UPDATES):
        if number == half:
            accelerator.save_state(Path(folder, "state"), blocking=True)
            accelerator.end_training()
            accelerator, model, optimizer = start_two(layout, make_two(seed=8))
            accelerator.load_state(Path(folder, "state"))
        name = ("default", "other", "other")[number % 3]
        plain.set_adapter(name)
        model.set_adapter(name)
        expected = adapters.train_by_hand(plain, by_hand, [number])
        assert adapters.train(accelerator, model, optimizer, [number]) == pytest.approx(expected, abs=adapters.CLOSE)
    assert not find_differences(accelerator, model, plain)
    accelerator.end_training()


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "pp", "tp"])
def test_two_adapters_learn_by_turns_before_and_after_a_resume(tmp_path, layout):
    run_ranks(switch_and_resume, 2, layout, str(tmp_path), timeout=280)


# -------------------------------------------------------------------- tied embeddings


def train_tied(layout: str, folder: str) -> None:
    for number, modules in enumerate((["lm_head"], ["embed_tokens"], ["lm_head", "embed_tokens"])):
        make = lambda modules=modules: make_tied(modules_to_save=modules)  # noqa: E731
        accelerator, model, plain = compare(layout, make)
        place = Path(folder, str(number))
        model.save_pretrained(place, is_main_process=accelerator.is_main_process)
        accelerator.wait_for_everyone()
        opened = peft.PeftModel.from_pretrained(make_tied().unload(), place)
        expected = adapters.read_logits(plain)
        torch.testing.assert_close(adapters.read_logits(opened), expected, atol=adapters.CLOSE, rtol=0)
        accelerator.end_training()


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["fsdp", "pp"])
def test_copies_of_tied_embeddings_learn_and_are_saved(tmp_path, layout):
    run_ranks(train_tied, 2, layout, str(tmp_path), timeout=280)


# -------------------------------------------------------------------- compilation and offloading


def train_compiled() -> None:
    accelerator, _, _ = compare("fsdp", make_lora, dynamo_backend="aot_eager")
    accelerator.end_training()


@pytest.mark.matrix
def test_lora_is_compiled_on_shards():
    run_ranks(train_compiled, 2, timeout=280)


def train_offloaded() -> None:
    for method in ("DoRA", "LoRA"):
        options = [ShardingOptions(cpu_offload=True)]
        accelerator, _, _ = compare("fsdp", lambda: adapters.make_adapted("llama", method), kwargs_handlers=options)
        accelerator.end_training()


@pytest.mark.matrix
def test_dora_learns_with_parameters_in_host_memory():
    run_ranks(train_offloaded, 2, timeout=280)


# -------------------------------------------------------------------- optimizers of eight and four bits

STEPS = {"AdamW8bit": 5e-3, "AdamWFp8": 5e-3, "AdamW4bit": 5e-2}
"""Relative tolerances by the quantization step: parts of matrices on two ranks have other blocks than the whole."""


def make_large() -> Any:
    """LoRA whose matrices have so many elements that torchao quantizes their states, also those of halves."""
    torch.manual_seed(0)
    config = adapters.make_base("llama").config
    config.hidden_size, config.intermediate_size, config.initializer_range = 128, 256, 0.1
    return add_lora(type(adapters.make_base("llama"))(config), r=64)


def train_low_bit(layout: str) -> None:
    from torchao import optim

    skip_compiler()
    for name, close in STEPS.items():
        accelerator = adapters.make_accelerator(layout)
        plain, model = make_large(), make_large()
        make = getattr(optim, name)
        expected = adapters.train_by_hand(plain, make(adapters.list_trainable(plain), lr=1e-2))
        model, optimizer = accelerator.prepare(model, make(adapters.list_trainable(model), lr=1e-2))
        assert adapters.train(accelerator, model, optimizer) == pytest.approx(expected, rel=close), name
        assert expected[0] > 1.03 * expected[-1], name
        kinds = {type(getattr(each, "_local_tensor", each)).__name__ for each in list_states(optimizer)}
        assert any(kind.startswith("OptimState") for kind in kinds), (name, kinds)
        accelerator.end_training()


def list_states(optimizer: Any) -> list[torch.Tensor]:
    return [each for state in optimizer.state.values() for each in state.values() if isinstance(each, torch.Tensor)]


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["tp", "pp", "fsdp+tp=2"])
def test_lora_learns_with_states_of_few_bits(layout):
    pytest.importorskip("torchao.optim", reason="torchao is not installed")
    run_ranks(train_low_bit, 4 if "+" in layout else 2, layout, timeout=280)


# -------------------------------------------------------------------- Fourier transforms in float32


def make_fourier() -> Any:
    base = adapters.make_base("llama")
    torch.manual_seed(1)
    config = peft.FourierFTConfig(n_frequency=20, scaling=15.0, **adapters.make_target_options("llama"))
    return peft.get_peft_model(base, config)


def transform_exactly(layer: Any, adapter: str) -> torch.Tensor:
    """PEFT's `get_delta_weight`, in the spectrum's own dtype."""
    spectrum, (rows, columns) = layer.fourierft_spectrum[adapter], layer.indices[adapter]
    dense = torch.zeros(layer.out_features, layer.in_features, dtype=spectrum.dtype)
    dense[rows, columns] = spectrum
    return torch.fft.ifft2(dense).real * layer.fourierft_scaling[adapter]


def train_fourier(layout: str) -> None:
    from peft.tuners.fourierft.layer import FourierFTLayer

    FourierFTLayer.get_delta_weight = transform_exactly
    accelerator = adapters.make_accelerator(layout)
    plain = make_fourier()
    expected = adapters.train_by_hand(plain)
    begun = dict(make_fourier().named_parameters())
    model, optimizer = adapters.prepare(accelerator, make_fourier())
    losses = adapters.train(accelerator, model, optimizer)
    assert losses == pytest.approx(expected, abs=adapters.CLOSE)
    for name, value in adapters.gather_parameters(accelerator, model).items():
        torch.testing.assert_close(value, plain.get_parameter(name).detach(), atol=1e-9, rtol=0, msg=name)
        assert "spectrum" not in name or float((value - begun[name]).abs().max()) > 1e-3


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["fsdp", "pp"])
def test_fourierft_differs_from_one_process_by_rounding_only(layout):
    run_ranks(train_fourier, 2, layout, timeout=280)


# -------------------------------------------------------------------- other ranks and layouts


def save_half(layout: str, folder: str) -> None:
    accelerator = adapters.make_accelerator(layout, project_config=ProjectConfiguration(folder, save_frozen=False))
    model, optimizer = adapters.prepare(accelerator, make_lora())
    adapters.train(accelerator, model, optimizer, range(10))
    accelerator.save_state(Path(folder, "state"), blocking=True)
    accelerator.end_training()


def continue_half(layout: str, folder: str) -> None:
    plain = make_lora()
    expected = adapters.train_by_hand(plain)
    accelerator = adapters.make_accelerator(layout)
    model, optimizer = adapters.prepare(accelerator, make_lora(seed=7))
    accelerator.load_state(Path(folder, "state"))
    losses = adapters.train(accelerator, model, optimizer, range(10, adapters.NUM_UPDATES))
    assert losses == pytest.approx(expected[10:], abs=adapters.CLOSE)
    assert not find_differences(accelerator, model, plain)
    accelerator.end_training()


@pytest.mark.matrix
def test_lora_is_resumed_with_other_ranks_and_layouts(tmp_path):
    for (saved, before), (loaded, after) in [
        (("fsdp", 2), ("fsdp+tp=2", 4)),
        (("pp", 2), ("fsdp", 3)),
        (("fsdp", 4), ("pp", 2)),
        (("tp", 2), ("one process", 1)),
    ]:
        folder = str(tmp_path / f"{saved} {loaded}")
        run_ranks(save_half, before, saved, folder, timeout=280)
        run_ranks(continue_half, after, loaded, folder, timeout=280)


# -------------------------------------------------------------------- merging


def merge_after(layout: str, folder: str) -> None:
    """`save_model` has the base and the adapters, which a plain model merges. On shards, merging is refused."""
    accelerator, model, plain = compare(layout, make_lora)
    accelerator.save_model(model, folder)
    if layout == "ddp":
        merged = model.merge_and_unload()
    else:
        with pytest.raises(UnsupportedError, match=r"save the adapter with model\.save_pretrained"):
            model.merge_and_unload()
        merged = make_lora(seed=9)
        values = load_file(Path(folder, "model.safetensors"))
        assert not any(merged.load_state_dict(values, strict=False))
        merged = merged.merge_and_unload()
    expected = adapters.read_logits(plain.merge_and_unload())
    torch.testing.assert_close(adapters.read_logits(merged), expected, atol=adapters.CLOSE, rtol=0)
    accelerator.end_training()


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "pp"])
def test_adapters_are_merged_after_a_training(tmp_path, layout):
    run_ranks(merge_after, 2, layout, str(tmp_path), timeout=280)
