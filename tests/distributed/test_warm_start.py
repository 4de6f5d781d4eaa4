"""Test `load_weights` from a checkpoint of Headway itself: any layout reads weights that any other layout has saved."""

from pathlib import Path

import pytest
import torch

from headway import Accelerator, ExponentialMovingAverage
from headway.errors import CheckpointError
from tests.devices import ON_CPU
from tests.distributed.layouts import VOCABULARY, build_seeded, gather_weights, make_tokens
from tests.distributed.ranks import run_ranks

LAYOUTS = ("ddp", "fsdp", "tp=2")


def make_llama():
    """Return a Llama whose attention heads two ranks can share."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=True, use_cache=False, **sizes))


def save(folder: str, layout: str) -> dict[str, dict[str, torch.Tensor]]:
    """Make two updates, save the state, and return the whole weights and averages."""
    accelerator = Accelerator(cpu=ON_CPU, strategy=layout)
    model = build_seeded(1, make_llama)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    average = ExponentialMovingAverage(model, 0.5)
    accelerator.register_for_checkpointing(average)
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(make_tokens()).logits.square().mean())
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_state(Path(folder, layout))
    weights = gather_weights(model)
    with average.swap_weights():
        averages = gather_weights(model)
    return {"model": weights, "ema": averages}


def load(folder: str, layout: str, saved: dict[str, dict[str, dict[str, torch.Tensor]]]) -> list[str]:
    """Load the checkpoints of all layouts before and after `prepare`. Return what differs from the saved weights."""
    failed = []
    accelerator = Accelerator(cpu=ON_CPU, strategy=layout)
    for source, (name, expected) in [(source, each) for source in saved for each in saved[source].items()]:
        for is_before in (True, False):
            with torch.device("meta" if is_before else "cpu"):
                model = make_llama()
            weights = None if name == "model" else name
            if is_before:
                accelerator.load_weights(model, Path(folder, source), strict=True, weights=weights)
            model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
            if not is_before:
                accelerator.load_weights(model, Path(folder, source), strict=True, weights=weights)
            found = gather_weights(model)
            differing = [key for key in expected if not torch.equal(found[key], expected[key])]
            if differing or found.keys() != expected.keys() or optimizer.optimizer.state:
                failed.append(f"{source} -> {layout}, {name}, {is_before}: {differing[:3]}")
            accelerator.free_memory()
    return failed


def load_damaged(folder: str, layout: str) -> tuple[str, bool]:
    """Load a damaged checkpoint into a prepared model. Return the error, and whether the weights changed."""
    accelerator = Accelerator(cpu=ON_CPU, strategy=layout)
    model = accelerator.prepare(make_llama())
    before = gather_weights(model)
    try:
        accelerator.load_weights(model, folder)
    except CheckpointError as error:
        after = gather_weights(model)
        return str(error), any(not torch.equal(after[name], before[name]) for name in before)
    return "", True


@pytest.mark.slow
def test_every_layout_loads_the_weights_that_every_layout_saved(tmp_path):
    saved = {layout: run_ranks(save, 2, str(tmp_path), layout)[0] for layout in LAYOUTS}
    for layout in LAYOUTS:
        for failed in run_ranks(load, 2, str(tmp_path), layout, saved):
            assert not failed, failed


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_a_damaged_checkpoint_changes_no_weight(tmp_path, layout):
    run_ranks(save, 2, str(tmp_path), layout)
    for file in (tmp_path / layout).glob("**/*.safetensors"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    for error, has_changed in run_ranks(load_damaged, 2, str(tmp_path / layout), layout):
        assert "is damaged or incomplete, and nothing was loaded" in error
        assert not has_changed
