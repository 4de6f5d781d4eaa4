"""Adapters beside a frozen base: LoRA in every layout, checkpoints without the base, and bases of four and eight bits."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headway import Accelerator, ProjectConfiguration
from headway.errors import CheckpointError, UnsupportedError
from headway.weights.files import open_checkpoint
from headway.weights.pieces import is_dtensor
from headway.weights.shards import raw_bytes
from tests.devices import ON_CPU
from tests.distributed.layouts import seeded, text, whole_weights
from tests.distributed.ranks import run_ranks
from tests.distributed.test_pretrained import pairs_of_heads

peft = pytest.importorskip("peft")
EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj", "down_proj"]


def adapted(base: int = 0) -> Any:
    return with_adapters(seeded(base, lambda: pairs_of_heads(True)))


def with_adapters(model: Any) -> Any:
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=EVERY))
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5, momentum=0.9)


def updates(accelerator: Accelerator, model: nn.Module, optimizer: Any, numbers: range) -> list[float]:
    shard, norms = accelerator.strategy.data_shard, []
    for number in numbers:
        rows = text(number, 4)[shard.index :: shard.count]
        accelerator.backward(model(rows).logits.square().mean(), weight=len(rows))
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def by_hand(num_updates: int, make: Callable[[], Any] = adapted) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, norms = make(), []
    optimizer = optimizer_of(model)
    for number in range(num_updates):
        model(text(number, 4)).logits.square().mean().backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, model.state_dict()


def lora(layout: str) -> bool:
    accelerator = Accelerator(cpu=ON_CPU, strategy=layout)
    model = adapted()
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    norms = updates(accelerator, model, optimizer, range(4))
    wanted, weights = by_hand(4)
    assert norms == pytest.approx(wanted, abs=1e-6)
    for name, value in whole_weights(model).items():
        torch.testing.assert_close(value, weights[name], atol=1e-6, rtol=1e-5, msg=name)
    base = model.get_parameter("base_model.model.model.layers.0.mlp.up_proj.base_layer.weight")
    return is_dtensor(base) and base.to_local().numel() < base.numel()


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "tp=2", "fsdp+tp=2"])
def test_lora_is_that_of_one_process(layout):
    for is_cut in run_ranks(lora, 4 if "+" in layout else 2, layout):
        assert is_cut == (layout != "ddp")


def onto_shards(folder: str, layout: str) -> None:
    """A base on the meta device, read before or after its adapters came; these begin as PEFT says."""
    accelerator = Accelerator(cpu=ON_CPU, strategy=layout)
    for is_first in (True, False):
        with torch.device("meta"):
            model: Any = pairs_of_heads(True)
        if is_first:
            accelerator.load_weights(model, folder)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=EVERY))
        if not is_first:
            accelerator.load_weights(model.get_base_model(), folder)
        found = whole_weights(accelerator.prepare(model))
        wanted = adapted().state_dict()
        for name, value in found.items():
            if "lora_B" in name:
                assert not value.any(), name
            elif "lora_A" in name:
                assert 0 < float(value.abs().max()) <= 1 / value.shape[1] ** 0.5, name
            else:
                assert torch.equal(value, wanted[name]), name
        accelerator.free_memory()


@pytest.mark.parametrize("layout", ["fsdp", "tp=2"])
def test_a_base_is_read_straight_into_shards_beside_new_adapters(tmp_path, layout):
    seeded(0, lambda: pairs_of_heads(True)).save_pretrained(tmp_path)
    run_ranks(onto_shards, 2, str(tmp_path), layout)


# -------------------------------------------------------------------- checkpoints without the base


def half(folder: str, layout: str) -> None:
    project = ProjectConfiguration(folder, save_frozen=False)
    accelerator = Accelerator(cpu=ON_CPU, strategy=layout, project_config=project)
    model = adapted()
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    updates(accelerator, model, optimizer, range(2))
    accelerator.save_state(Path(folder, "half"))
    accelerator.save_state(Path(folder, "again"))  # digests that are known


def rest(folder: str, layout: str) -> None:
    accelerator = Accelerator(cpu=ON_CPU, strategy=layout)
    model = adapted(base=5)
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    before = whole_weights(model)
    with pytest.raises(CheckpointError, match=r"16 of 21 are others here.*embed_tokens.*Build the model on the base"):
        accelerator.load_state(Path(folder, "half"))
    assert all(torch.equal(value, before[name]) for name, value in whole_weights(model).items())
    accelerator.free_memory()
    model = adapted()
    with torch.no_grad():  # one element of the base
        model.get_parameter("base_model.model.model.norm.weight")[3] += 1e-6
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    with pytest.raises(CheckpointError, match=r"1 of 21 are others here.*norm.weight"):
        accelerator.load_state(Path(folder, "half"))
    accelerator.free_memory()
    model = adapted()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.zero_()
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    accelerator.load_state(Path(folder, "again"))
    norms = updates(accelerator, model, optimizer, range(2, 4))
    assert norms == pytest.approx(by_hand(4)[0][2:], abs=1e-6)


@pytest.mark.parametrize(("saved", "loaded"), [("ddp", "fsdp"), ("fsdp", "tp=2"), ("tp=2", "ddp")])
def test_a_checkpoint_names_its_base_and_every_layout_takes_it_up(tmp_path, saved, loaded):
    run_ranks(half, 2, str(tmp_path), saved)
    run_ranks(rest, 2, str(tmp_path), loaded)


def large(folder: str) -> tuple[int, int]:
    """The adapter's bytes, and the checkpoint's."""
    project = ProjectConfiguration(folder, save_frozen=False)
    accelerator = Accelerator(cpu=ON_CPU, strategy="fsdp", project_config=project)
    base = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024, bias=False)) for _ in range(8)))
    model = peft.get_peft_model(base, peft.LoraConfig(r=32, target_modules=[f"{n}.0" for n in range(8)]))
    model = accelerator.prepare(model)
    accelerator.save_state(Path(folder, "state"))
    size = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    accelerator.wait_for_everyone()
    return size, sum(file.stat().st_size for file in Path(folder, "state").rglob("*") if file.is_file())


def test_its_size_is_the_adapters(tmp_path):
    for adapter, checkpoint in run_ranks(large, 2, str(tmp_path)):
        assert adapter < checkpoint <= 1.1 * adapter, (adapter, checkpoint)


# -------------------------------------------------------------------- merged on their way out


def with_more(kind: str) -> Any:
    """An embedding and a tied head that are adapted, or a head that is trained whole, in bf16."""
    model: Any = seeded(0, lambda: pairs_of_heads(kind == "tied")).bfloat16()
    targets = [*EVERY, *(["embed_tokens"] if kind == "tied" else [])]
    more: dict[str, Any] = {"modules_to_save": ["lm_head"], "use_dora": True} if kind == "head" else {}
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, **more))
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def merged(layout: str) -> None:
    accelerator = Accelerator(cpu=ON_CPU, strategy=layout)
    for kind in ("plain",) if layout == "tp=2" else ("plain", "tied", "head"):
        wanted = with_more(kind).merge_and_unload().state_dict()
        model = accelerator.prepare(with_more(kind))
        before = whole_weights(model)
        stream = accelerator.stream_weights(model, "6KiB", merge_adapters=True)
        found = {name: tensor.clone() for bucket in stream for name, tensor in bucket}
        tied = {"lm_head.weight"} if kind == "tied" else set()
        assert found.keys() == wanted.keys() - tied == {name for name, *_ in stream.metadata}
        for name, value in found.items():
            same = torch.equal(value, wanted[name]) if accelerator.is_main_process else value.is_meta
            assert same, (layout, kind, name)
        after = whole_weights(model)
        assert all(each.is_meta or torch.equal(each, before[name]) for name, each in after.items())
        accelerator.free_memory()
    if layout == "ddp":
        with pytest.raises(UnsupportedError, match="Sequential has no adapters that PEFT could merge"):
            accelerator.stream_weights(accelerator.prepare(nn.Sequential(nn.Linear(2, 2))), merge_adapters=True)


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "tp=2", "pp=2"])
def test_merged_adapters_are_those_that_peft_merges(layout):
    run_ranks(merged, 2, layout, timeout=400)


def streamed(kind: str, folder: str) -> None:
    """What `save_model` writes, packed weights and their scales included."""
    accelerator = Accelerator(cpu=ON_CPU, strategy="fsdp")
    model = accelerator.prepare(on_base(kind))
    accelerator.save_model(model, folder)
    found = {name: each.clone() for bucket in accelerator.stream_weights(model, "6KiB") for name, each in bucket}
    wanted = {name: stored.tensor() for name, stored in open_checkpoint(folder).tensors.items()}
    assert found.keys() == wanted.keys() == on_base(kind).state_dict().keys() - {"base_model.model.lm_head.weight"}
    assert any("nf4" in name or "SCB" in name for name in found)
    for name, each in found.items() if accelerator.is_main_process else ():
        assert torch.equal(raw_bytes(each), raw_bytes(wanted[name])), (
            name
        )  # read as floats, some packed ones are no numbers
    with pytest.raises(UnsupportedError, match="on quantised bases, leave it out"):
        accelerator.stream_weights(model, merge_adapters=True)


@pytest.mark.parametrize("kind", ["bitsandbytes, nf4", "bitsandbytes, int8"])
def test_quantised_bases_are_streamed_as_they_are_saved(tmp_path, kind):
    pytest.importorskip("bitsandbytes")
    run_ranks(streamed, 2, kind, str(tmp_path), timeout=400)


# -------------------------------------------------------------------- quantised bases


def on_base(kind: str) -> Any:
    """LoRA on a quantised base; NF4 is stored as float32, as FSDP wants it."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = seeded(0, lambda: pairs_of_heads(True, **sizes))
    if kind == "torchao, int8":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model.model.layers, Int8WeightOnlyConfig())
        return with_adapters(model)
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    for module in list(model.model.layers.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                shape = (child.in_features, child.out_features)
                how = {"compute_dtype": torch.float32, "quant_type": "nf4", "quant_storage": torch.float32}
                is_nf4 = kind == "bitsandbytes, nf4"
                made = (
                    Linear4bit(*shape, False, **how) if is_nf4 else Linear8bitLt(*shape, False, has_fp16_weights=False)
                )
                made.load_state_dict(child.state_dict())
                setattr(module, name, made.to("cpu"))
    return with_adapters(model)


def quantised(kind: str, layout: str) -> tuple[bool, bool]:
    accelerator = Accelerator(cpu=ON_CPU, strategy=layout)
    model = on_base(kind)
    with torch.no_grad():  # rank 0's adapters and norms reach all
        for parameter in model.parameters():
            if parameter.is_floating_point() and "int8" not in kind and accelerator.process_index:
                parameter.zero_()
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    norms = updates(accelerator, model, optimizer, range(4))
    assert norms == pytest.approx(by_hand(4, partial(on_base, kind))[0], abs=1e-6)
    base = model.get_parameter("base_model.model.model.layers.0.mlp.up_proj.base_layer.weight")
    return is_dtensor(base) and base.to_local().numel() < base.numel(), base.numel() == 128 * 256 // 8


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", ["bitsandbytes, nf4", "bitsandbytes, int8", "torchao, int8"])
def test_lora_on_a_quantised_base_is_that_of_one_process(kind, layout):
    pytest.importorskip(kind.partition(",")[0])
    for is_cut, is_packed in run_ranks(quantised, 2, kind, layout):
        assert is_packed == ("nf4" in kind)
        assert is_cut == (layout == "fsdp" and "nf4" in kind)
