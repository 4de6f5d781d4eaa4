"""Adapters beside a frozen base: PEFT's methods in every layout, checkpoints without the base, and bases of four and eight bits."""

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headway import Accelerator, DistributedDataParallelKwargs, ProjectConfiguration, TensorParallelOptions
from headway.core.weights.files import open_checkpoint
from headway.core.weights.pieces import is_dtensor
from headway.core.weights.shards import get_raw_bytes
from headway.errors import CheckpointError, PrepareError, UnsupportedError
from tests.devices import ON_CPU
from tests.distributed.layouts import seeded, text, whole_weights
from tests.distributed.ranks import run_ranks
from tests.distributed.test_pretrained import pairs_of_heads

peft = pytest.importorskip("peft")
from tests.distributed import adapters  # noqa: E402 - needs PEFT

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
        assert torch.equal(get_raw_bytes(each), get_raw_bytes(wanted[name])), (
            name
        )  # read as floats, some packed ones are no numbers
    with pytest.raises(UnsupportedError, match="on quantized bases, leave it out"):
        accelerator.stream_weights(model, merge_adapters=True)


@pytest.mark.parametrize("kind", ["bitsandbytes, nf4", "bitsandbytes, int8"])
def test_quantized_bases_are_streamed_as_they_are_saved(tmp_path, kind):
    pytest.importorskip("bitsandbytes")
    run_ranks(streamed, 2, kind, str(tmp_path), timeout=400)


# -------------------------------------------------------------------- quantized bases


def on_base(kind: str) -> Any:
    """LoRA on a quantized base; NF4 is stored as float32, as FSDP wants it."""
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


def quantized(kind: str, layout: str) -> tuple[bool, bool]:
    accelerator = Accelerator(cpu=ON_CPU, strategy=layout)
    model = on_base(kind)
    with torch.no_grad():  # rank 0's adapters and norms reach all
        for parameter in model.parameters():
            if parameter.is_floating_point() and "int8" not in kind and accelerator.process_index:
                parameter.zero_()
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    norms = updates(accelerator, model, optimizer, range(4))
    assert norms == pytest.approx(by_hand(4, partial(on_base, kind))[0], abs=1e-6)
    number = 1 if layout == "pp" and accelerator.process_index else 0  # a block of this stage
    base = model.get_parameter(f"base_model.model.model.layers.{number}.mlp.up_proj.base_layer.weight")
    return is_dtensor(base) and base.to_local().numel() < base.numel(), base.numel() == 128 * 256 // 8


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "pp"])
@pytest.mark.parametrize("kind", ["bitsandbytes, nf4", "bitsandbytes, int8", "torchao, int8"])
def test_lora_on_a_quantized_base_is_that_of_one_process(kind, layout):
    pytest.importorskip(kind.partition(",")[0])
    for is_cut, is_packed in run_ranks(quantized, 2, kind, layout):
        assert is_packed == ("nf4" in kind)
        assert is_cut == (layout == "fsdp" and "nf4" in kind)


def refuse_quantized(kind: str) -> None:
    """No rank computes with a part of packed values, whatever layers the plan names."""
    for plan in (None, {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}):
        options = TensorParallelOptions(plan=plan)
        accelerator = Accelerator(cpu=ON_CPU, strategy="tp", kwargs_handlers=[options])
        match = r"_proj' .*because its weight is quantized.*one of the layouts fsdp, ddp and pp"
        with pytest.raises(PrepareError, match=match):
            accelerator.prepare(on_base(kind))
        accelerator.end_training()


@pytest.mark.parametrize("kind", ["bitsandbytes, nf4", "bitsandbytes, int8", "torchao, int8"])
def test_tensor_parallelism_refuses_quantized_weights(kind):
    pytest.importorskip(kind.partition(",")[0])
    run_ranks(refuse_quantized, 2, kind)


# -------------------------------------------------------------------- every method in every layout


Cell = tuple[str, str]


def train_cells(layout: str, wanted: bytes) -> dict[Cell, dict[str, torch.Tensor] | str]:
    """For each model and method the adapters after twenty updates on this rank, or the error of `prepare`."""
    results: dict[Cell, dict[str, torch.Tensor] | str] = {}
    references: dict[Cell, adapters.Reference] = torch.load(io.BytesIO(wanted), weights_only=False)
    for cell, reference in references.items():
        accelerator = adapters.start(layout)
        try:
            model, optimizer = adapters.prepare(accelerator, adapters.make_adapted(*cell))
        except PrepareError as error:
            results[cell] = str(error)
            accelerator.free_memory()
            continue
        losses = adapters.train(accelerator, model, optimizer)
        assert losses == pytest.approx(reference.losses, abs=adapters.CLOSE), (layout, cell)
        found = adapters.read_whole(accelerator, model)
        ended = {name: value for name, value in reference.ended.items() if layout != "pp" or name in found}
        assert not adapters.find_differences(found, ended), (layout, cell)
        for name, value in found.items():
            if "ranknum" in name:  # AdaLoRA's divisors, which are trainable, but hardly change
                continue
            moved = float((value - reference.begun[name]).abs().max())
            assert moved > 100 * adapters.CLOSE if name in reference.trained else moved == 0, (layout, cell, name)
        results[cell] = {name: found[name] for name in ended if name in reference.trained}
        accelerator.free_memory()
    return results


@pytest.mark.parametrize(
    ("layout", "only"),
    [("ep", "LoRA of experts"), *(pytest.param(each, None, marks=pytest.mark.matrix) for each in adapters.LAYOUTS)],
)
def test_adapters_are_those_of_one_process_and_equal_on_all_ranks(layout, only):
    cells = [(model, method) for model, methods in adapters.CELLS[layout].items() for method in methods]
    wanted = {cell: adapters.run_by_hand(*cell) for cell in cells if only in (None, cell[1])}
    packed = io.BytesIO()
    torch.save(wanted, packed)
    results = run_ranks(train_cells, adapters.LAYOUTS[layout], layout, packed.getvalue(), timeout=280)
    for cell in wanted:
        first = results[0][cell]
        assert isinstance(first, str) == adapters.is_refused(cell[1], layout), (cell, first)
        if not isinstance(first, str):  # the stages of a pipeline have different adapters
            assert {name for result in results for name in result[cell]} == wanted[cell].trained
        for result in results[1:]:
            if isinstance(first, str):
                assert result[cell] == first
                hint = adapters.HINTS.get(cell[1], "Use LoRA or rsLoRA, or one of the layouts fsdp, ddp, ep and pp")
                assert hint in first
            else:  # bit by bit: parts are put together over the ranks, copies are this rank's own
                assert layout == "pp" or result[cell].keys() == first.keys()
                assert all(torch.equal(value, first[name]) for name, value in result[cell].items() if name in first)


# -------------------------------------------------------------------- PEFT's own methods on a prepared model


def save_and_open(layout: str, folder: str, model: str, method: str) -> None:
    """`save_pretrained` on all ranks gives the file that a plain model opens, and so does a prepared one."""
    accelerator = adapters.start(layout)
    prepared, optimizer = adapters.prepare(accelerator, adapters.make_adapted(model, method))
    adapters.train(accelerator, prepared, optimizer, range(4))
    prepared.save_pretrained(folder, is_main_process=accelerator.is_main_process)
    accelerator.wait_for_everyone()
    plain = adapters.make_adapted(model, method)
    adapters.by_hand(plain, updates=range(4))
    wanted = adapters.read_logits(plain)
    opened = peft.PeftModel.from_pretrained(adapters.make_base(model), folder)
    torch.testing.assert_close(adapters.read_logits(opened), wanted, atol=adapters.CLOSE, rtol=0)
    other = accelerator.prepare(adapters.make_adapted(model, method, seed=7))
    assert float((adapters.read_logits(other) - wanted).abs().max()) > 0.01
    other.load_adapter(folder, "default")
    torch.testing.assert_close(adapters.read_logits(other), wanted, atol=adapters.CLOSE, rtol=0)
    accelerator.free_memory()


def make_two(method: str = "LoRA") -> Any:
    model = adapters.make_adapted("llama", method)
    torch.manual_seed(5)
    model.add_adapter("other", adapters.METHODS[method]("llama"))
    return model


def list_lora(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if "lora_" in name]


def switch(layout: str, folder: str) -> None:
    """Two adapters learn by turns; each is saved under its name."""
    options = [DistributedDataParallelKwargs(find_unused_parameters=True)] if layout == "ddp" else []
    accelerator = adapters.start(layout, kwargs_handlers=options)
    plain, model = make_two(), make_two()
    if layout == "ddp":  # which reduces what learns when it is prepared
        for parameter in list_lora(model):
            parameter.requires_grad_(True)
    by_hand = adapters.make_optimizer(list_lora(plain))
    model, optimizer = accelerator.prepare(model, adapters.make_optimizer(list_lora(model)))
    for number, name in enumerate(["default", "other", "default", "other"]):
        plain.set_adapter(name)
        model.set_adapter(name)
        updates = [2 * number, 2 * number + 1]
        wanted = adapters.by_hand(plain, by_hand, updates)
        assert adapters.train(accelerator, model, optimizer, updates) == pytest.approx(wanted, abs=adapters.CLOSE)
    assert not adapters.find_differences(adapters.read_whole(accelerator, model), dict(plain.named_parameters()))
    model.save_pretrained(folder, is_main_process=accelerator.is_main_process)
    accelerator.wait_for_everyone()
    opened = peft.PeftModel.from_pretrained(adapters.make_base("llama"), Path(folder, "other"))
    wanted = adapters.read_logits(plain)
    torch.testing.assert_close(adapters.read_logits(opened), wanted, atol=adapters.CLOSE, rtol=0)
    accelerator.free_memory()


def compare_with_base(model: Any, rows: torch.Tensor) -> torch.Tensor:
    """A loss that needs the model without its adapters, as DPO's does."""
    with torch.no_grad(), model.disable_adapter():
        reference = model(input_ids=rows).logits
    out = model(input_ids=rows, labels=rows)
    return out.loss + 0.1 * (out.logits - reference).square().mean()  # type: ignore[no-any-return]


def disable(layout: str) -> None:
    accelerator = adapters.start(layout)
    plain = adapters.make_adapted("llama", "LoRA")
    model, optimizer = adapters.prepare(accelerator, adapters.make_adapted("llama", "LoRA"))
    wanted = adapters.by_hand(plain, updates=range(4), loss_of=compare_with_base)
    losses = adapters.train(accelerator, model, optimizer, range(4), compare_with_base)
    assert losses == pytest.approx(wanted, abs=adapters.CLOSE)
    accelerator.free_memory()


def train_on_half(layout: str) -> None:
    """A frozen base in bf16 with adapters in float32, which PEFT makes of it."""
    accelerator = adapters.start(layout)
    plain, model = (adapters.make_adapted("llama", "LoRA", dtype=torch.bfloat16) for _ in range(2))
    wanted = adapters.by_hand(plain, updates=range(4))
    model, optimizer = adapters.prepare(accelerator, model)
    losses = adapters.train(accelerator, model, optimizer, range(4))
    assert losses == pytest.approx(wanted, abs=1e-2)
    assert {parameter.dtype for parameter in adapters.list_trained(model)} == {torch.float32}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32, torch.bfloat16}
    accelerator.free_memory()


def recompute(layout: str, is_reentrant: bool) -> None:
    accelerator = adapters.start(layout)

    def make() -> Any:
        base = adapters.make_base("llama")
        base.enable_input_require_grads()
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": is_reentrant})
        torch.manual_seed(1)
        return peft.get_peft_model(base, adapters.METHODS["LoRA"]("llama"))

    wanted = adapters.by_hand(make(), updates=range(3))
    model, optimizer = adapters.prepare(accelerator, make())
    losses = adapters.train(accelerator, model, optimizer, range(3))
    assert losses == pytest.approx(wanted, abs=adapters.CLOSE)
    accelerator.free_memory()


def refuse_changes(layout: str) -> None:
    """What cannot be done on shards is an error that names what can."""
    accelerator = adapters.start(layout)
    model, optimizer = adapters.prepare(accelerator, adapters.make_adapted("llama", "LoRA"))
    config = adapters.METHODS["LoRA"]("llama")
    with pytest.raises(UnsupportedError, match=r"add_adapter.*Add all adapters before prepare"):
        model.add_adapter("other", config)
    for method in ("merge_and_unload", "merge_adapter", "unload"):
        with pytest.raises(UnsupportedError, match=rf"{method}.*stream_weights\(model, merge_adapters=True\)"):
            getattr(model, method)()
    with pytest.raises(UnsupportedError, match=r"delete_adapter.*set_adapter"):
        model.delete_adapter("default")
    base = accelerator.prepare(adapters.make_base("llama"))
    with pytest.raises(UnsupportedError, match=r"get_peft_model.*before prepare"):
        peft.get_peft_model(base, config)
    if "tp" in layout:  # below, a whole adapter would meet split activations
        accelerator.free_memory()
        return
    adapters.train(accelerator, model, optimizer, range(1))
    layer = model.base_model.model.model.layers[0].self_attn.q_proj  # in the way of PEFT's own
    layer.lora_A["other"] = nn.Linear(16, 2, bias=False, dtype=torch.float64)
    layer.lora_B["other"] = nn.Linear(2, 16, bias=False, dtype=torch.float64)
    layer.lora_dropout["other"], layer.scaling["other"] = nn.Identity(), 1.0
    layer.set_adapter(["default", "other"])
    optimizer.add_param_group({"params": [layer.lora_A["other"].weight, layer.lora_B["other"].weight]})
    with pytest.raises(PrepareError, match=r"has 2 parameters .* Add layers and adapters before prepare"):
        adapters.train(accelerator, model, optimizer, range(1, 3))
    accelerator.free_memory()


def add_to_replicas() -> None:
    """DDP: what is added after `prepare` is an error, until it is prepared anew."""
    accelerator = adapters.start("ddp")
    model, _ = adapters.prepare(accelerator, adapters.make_adapted("llama", "LoRA"))
    model.add_adapter("other", adapters.METHODS["LoRA"]("llama"))
    model.set_adapter("other")
    late = accelerator.prepare(adapters.make_optimizer(adapters.list_trained(model)))
    with pytest.raises(PrepareError, match=r"Add layers and adapters before prepare"):
        adapters.train(accelerator, model, late, range(1))
    accelerator.free_memory()
    model.zero_grad()
    model, optimizer = adapters.prepare(accelerator, model)
    plain = make_two()
    with torch.no_grad():
        for parameter, own in zip(model.parameters(), plain.parameters(), strict=True):
            own.copy_(parameter)
    plain.set_adapter("other")
    losses = adapters.train(accelerator, model, optimizer, range(3))
    assert losses == pytest.approx(adapters.by_hand(plain, updates=range(3)), abs=adapters.CLOSE)
    merged = model.merge_and_unload()
    torch.testing.assert_close(adapters.read_logits(merged), adapters.read_logits(plain), atol=adapters.CLOSE, rtol=0)
    accelerator.free_memory()


def use_as_peft_does(layout: str, folder: str) -> None:
    for method in ("LoRA", *(() if "tp" in layout else ("DoRA", "LoRA with modules_to_save")), "prompt tuning"):
        save_and_open(layout, f"{folder}/{method}", "llama", method)
    switch(layout, f"{folder}/two")
    disable(layout)
    train_on_half(layout)
    recompute(layout, is_reentrant=False)
    recompute(layout, is_reentrant=True)
    if layout == "ddp":
        add_to_replicas()
    else:
        refuse_changes(layout)


@pytest.mark.parametrize(
    "layout",
    [pytest.param("fsdp", marks=pytest.mark.slow), *(pytest.param(n, marks=pytest.mark.matrix) for n in ("ddp", "tp"))],
)
def test_a_prepared_model_is_used_as_peft_documents_it(tmp_path, layout):
    run_ranks(use_as_peft_does, 2, layout, str(tmp_path), timeout=280)


def save_experts(folder: str) -> None:
    save_and_open("ep", folder, "mixtral", "LoRA of experts")
    accelerator = adapters.start("ep")
    wanted = adapters.make_adapted("mixtral", "LoRA of experts").merge_and_unload().state_dict()
    model = accelerator.prepare(adapters.make_adapted("mixtral", "LoRA of experts"))
    stream = accelerator.stream_weights(model, "6KiB", merge_adapters=True)
    found = {name: tensor.clone() for bucket in stream for name, tensor in bucket}
    assert found.keys() == wanted.keys()
    for name, value in found.items() if accelerator.is_main_process else ():
        torch.testing.assert_close(value, wanted[name], msg=name)


@pytest.mark.matrix
def test_adapters_of_distributed_experts_are_saved_opened_and_merged(tmp_path):
    run_ranks(save_experts, 2, str(tmp_path), timeout=280)


def resume(saved: str, loaded: str, folder: str, model: str, method: str) -> None:
    project = ProjectConfiguration(folder, save_frozen=False)
    accelerator = adapters.start(saved, project_config=project)
    prepared, optimizer = adapters.prepare(accelerator, adapters.make_adapted(model, method))
    adapters.train(accelerator, prepared, optimizer, range(3))
    accelerator.save_state(Path(folder, "state"))
    accelerator.end_training()
    accelerator = adapters.start(loaded)
    prepared, optimizer = adapters.prepare(accelerator, adapters.make_adapted(model, method, seed=7))
    accelerator.load_state(Path(folder, "state"))
    losses = adapters.train(accelerator, prepared, optimizer, range(3, 6))
    wanted = adapters.by_hand(adapters.make_adapted(model, method), updates=range(6))
    assert losses == pytest.approx(wanted[3:], abs=adapters.CLOSE)
    accelerator.free_memory()


def resume_each(folder: str) -> None:
    resume("fsdp", "ddp", f"{folder}/1", "llama", "DoRA")
    resume("tp", "fsdp", f"{folder}/2", "llama", "LoRA with modules_to_save")
    resume("ep", "fsdp", f"{folder}/3", "mixtral", "LoRA of experts")
    resume("fsdp", "ep", f"{folder}/4", "mixtral", "LoRA of experts")


@pytest.mark.matrix
def test_adapters_are_resumed_in_another_layout(tmp_path):
    run_ranks(resume_each, 2, str(tmp_path), timeout=280)


def test_the_page_shows_the_table():
    page = Path(__file__).parents[2] / "docs" / "adapters.md"
    assert adapters.write_table() in page.read_text()
