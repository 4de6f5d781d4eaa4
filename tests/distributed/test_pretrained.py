"""Pretrained weights loaded into shards are exactly equal to whole loading, and each rank reads its own part once."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from headway import Accelerator
from headway.errors import CheckpointError
from tests.devices import ON_CPU
from tests.distributed.layouts import VOCABULARY, build_seeded, gather_weights, gpt2, make_tokens
from tests.distributed.ranks import run_ranks


def mixtral() -> nn.Module:
    """Return a Mixtral. Its experts are stored one by one, and transformers stacks them when loading."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return MixtralForCausalLM(
        MixtralConfig(vocab_size=50, num_key_value_heads=1, num_local_experts=4, use_cache=False, **sizes)
    )


def make_two_head_llama(tied: bool, **others: int) -> nn.Module:
    """Return a Llama whose attention heads two ranks can share."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2} | others
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=tied, use_cache=False, **sizes))


MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: make_two_head_llama(False), "llama, tied": lambda: make_two_head_llama(True), "gpt2": gpt2, "mixtral": mixtral,
}  # fmt: skip
LAYOUTS = ("ddp", "fsdp", "hsdp=2", "tp=2", "fsdp+tp=2", "cp=2")


def make_lazy_model(make: Any, is_lazy: bool = True) -> nn.Module:
    with torch.device("meta" if is_lazy else "cpu"):
        model: nn.Module = make()
    return model


def load(folder: str, layout: str) -> list[str]:
    """Load weights before `prepare`, after it, and from rank 0's memory. Return the differences from a whole load."""
    failed = []
    accelerator = Accelerator(cpu=ON_CPU, strategy=layout)
    for name, make in MODELS.items():
        if "llama" not in name and "tp" in layout:
            continue  # transformers has no tensor-parallel plan for this model, or none that two ranks can follow
        expected = type(make()).from_pretrained(Path(folder, name)).state_dict()
        for way in ("before", "after", "rank 0"):
            model = make_lazy_model(make, way != "after" and (way != "rank 0" or accelerator.process_index > 0))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if way == "before":
                accelerator.load_weights(model, Path(folder, name))
            if way == "rank 0" and accelerator.process_index == 0:
                model.load_state_dict(expected)
            model, optimizer = accelerator.prepare(model, optimizer)
            if way == "after":
                accelerator.load_weights(model, Path(folder, name))
            found = gather_weights(model)
            differing = [key for key in expected if not torch.equal(found[key], expected[key])]
            if differing or found.keys() != expected.keys():
                failed.append(f"{layout}, {name}, {way}: {differing[:3]}")
            loss = model(make_tokens()).logits.square().mean()
            accelerator.backward(loss)
            optimizer.step()
            if not bool(torch.isfinite(accelerator.gather(loss.detach()[None])).all()):
                failed.append(f"{layout}, {name}, {way}: {loss}")
            accelerator.free_memory()
    return failed


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [each if each in ("hsdp=2", "fsdp+tp=2") else pytest.param(each, marks=pytest.mark.matrix) for each in LAYOUTS],
)
def test_weights_load_in_every_layout(tmp_path, layout):
    for name, make in MODELS.items():
        build_seeded(0, make).save_pretrained(tmp_path / name)
    num_ranks = 4 if "+" in layout or layout == "hsdp=2" else 2
    for failed in run_ranks(load, num_ranks, str(tmp_path), layout, timeout=240):
        assert not failed, failed


class Stack(nn.Module):
    """Model of blocks with one matrix each, which are the units of sharding."""

    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width, bias=False)) for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def read_process_counter(file: str, key: str) -> int:
    line = next(line for line in Path("/proc/self", file).read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * (1024 if file == "status" else 1)


def write_stack(folder: str, width: int, num_blocks: int) -> None:
    """Write a checkpoint of a `Stack`, with one file per block."""
    for number in range(num_blocks):
        value = torch.full((width, width), float(number))
        save_file({f"blocks.{number}.0.weight": value}, Path(folder, f"{number}.safetensors"))
    names = {f"blocks.{number}.0.weight": f"{number}.safetensors" for number in range(num_blocks)}
    Path(folder, "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def measure_loading(folder: str, width: int, num_blocks: int) -> dict[str, int]:
    """Return the bytes of this rank's part, the bytes that it read, and its peak memory above the start."""
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    accelerator.prepare(Stack(4, 2))  # imports and one-time allocations happen here
    accelerator.free_memory()
    with torch.device("meta"):
        model = Stack(width, num_blocks)
    Path("/proc/self/clear_refs").write_text("5")
    before, num_read = read_process_counter("status", "VmRSS"), read_process_counter("io", "rchar")
    accelerator.load_weights(model, folder)
    accelerator.prepare(model)
    part = sum(p.to_local().nbytes for p in model.parameters())  # type: ignore[attr-defined]
    return {
        "part": part,
        "read": read_process_counter("io", "rchar") - num_read,
        "peak": read_process_counter("status", "VmHWM") - before,
    }


def test_each_rank_reads_and_holds_only_its_part(tmp_path):
    width, num_blocks = 1024, 24
    unit = 4 * width * width
    write_stack(str(tmp_path), width, num_blocks)
    for num_ranks in (2, 8):  # so 8 ranks of a machine together hold one copy
        for found in run_ranks(measure_loading, num_ranks, str(tmp_path), width, num_blocks, timeout=240):
            assert found["part"] == unit * num_blocks // num_ranks
            assert found["read"] <= 1.1 * found["part"], found
            assert found["peak"] <= found["part"] + 1.1 * unit, found


def collect_errors(folder: str) -> list[str]:
    accelerator = Accelerator(cpu=ON_CPU, strategy="fsdp")
    messages = []
    save_file({"0.weight": torch.ones(4, 3)}, Path(folder, f"of_{accelerator.process_index}.safetensors"))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3))
    accelerator.wait_for_everyone()
    for source in ("of_0.safetensors", "nothing"):
        with pytest.raises(CheckpointError) as error:
            accelerator.load_weights(model, Path(folder, source))
        messages.append(str(error.value))
    # The checkpoint covers a part of the model, and the rest initializes itself.
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2))
    model = accelerator.prepare(model)
    Path(folder, "more").mkdir(exist_ok=True)
    tensors = {"weight": torch.full((4, 3), 7.0), **({"b": torch.ones(1)} if accelerator.process_index else {})}
    save_file(tensors, Path(folder, "more", f"{accelerator.process_index}.safetensors"))
    with pytest.raises(CheckpointError, match="contains other tensors on some ranks"):
        accelerator.load_weights(model[0], Path(folder, "more", f"{accelerator.process_index}.safetensors"))
    accelerator.load_weights(model[0], Path(folder, "more", "0.safetensors"))
    assert torch.equal(gather_weights(model)["0.weight"], torch.full((4, 3), 7.0))
    # One rank's file is deleted before it is read: an error on all ranks.
    accelerator.free_memory()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4, bias=False))
    own = Path(folder, f"own_{accelerator.process_index}.safetensors")
    save_file({"0.weight": torch.ones(4, 3)}, own)
    accelerator.load_weights(model, own)
    accelerator.wait_for_everyone()
    if accelerator.process_index:
        own.unlink()
    with pytest.raises(CheckpointError, match=r"could not be read completely.*own_1\.safetensors cannot be read"):
        accelerator.prepare(model)
    return messages


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.experts.gate_up_proj"])
def test_tensor_that_the_model_has_lost_is_an_error_before_anything_is_loaded(name: str, tmp_path: Path) -> None:
    """The first tensor is stored like this, and the second one is stacked from those of single experts."""
    mixtral().save_pretrained(tmp_path)  # type: ignore[operator]
    accelerator = Accelerator(cpu=ON_CPU)
    model = mixtral()
    weight = model.get_parameter("model.embed_tokens.weight").detach().clone()
    accelerator.load_weights(model, tmp_path)
    path, _, attribute = name.rpartition(".")
    delattr(model.get_submodule(path), attribute)
    with pytest.raises(
        CheckpointError, match=rf"nothing was loaded.*the model had {name} when load_weights\(\) was called"
    ):
        accelerator.prepare(model)
    assert torch.equal(model.get_parameter("model.embed_tokens.weight").cpu(), weight)


def test_misfits_and_missing_files_are_errors_on_every_rank(tmp_path):
    for misfit, absent in run_ranks(collect_errors, 2, str(tmp_path)):
        assert "Mismatched (1): 0.weight" in misfit
        assert "Missing from the checkpoint (1): 0.bias" in misfit
        assert "nothing does not exist" in absent
