"""Adapters on a frozen base: PEFT's methods in every layout, checkpoints without the base, and quantized bases."""

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from headway import Accelerator, DistributedDataParallelKwargs, ProjectConfiguration, TensorParallelOptions
from headway.core.weights.files import open_checkpoint
from headway.core.weights.pieces import is_dtensor, split_wrappers
from headway.core.weights.tensor_bytes import get_raw_bytes
from headway.errors import CheckpointError, PrepareError, UnsupportedError
from tests.devices import ON_CPU
from tests.distributed.layouts import build_seeded, gather_weights, make_tokens
from tests.distributed.ranks import run_ranks
from tests.distributed.test_pretrained import make_two_head_llama

peft = pytest.importorskip("peft")
from tests.distributed import adapters  # noqa: E402 - needs PEFT

EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj", "down_proj"]


def make_adapted(base: int = 0) -> Any:
    return add_adapters(build_seeded(base, lambda: make_two_head_llama(True)))


def add_adapters(model: Any) -> Any:
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=EVERY))
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5, momentum=0.9)


def run_updates(accelerator: Accelerator, model: nn.Module, optimizer: Any, numbers: range) -> list[float]:
    shard, norms = accelerator.strategy.data_shard, []
    for number in numbers:
        rows = make_tokens(number, 4)[shard.index :: shard.count]
        accelerator.backward(model(rows).logits.square().mean(), weight=len(rows))
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def train_by_hand(
    num_updates: int, make: Callable[[], Any] = make_adapted
) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, norms = make(), []
    optimizer = make_optimizer(model)
    for number in range(num_updates):
        model(make_tokens(number, 4)).logits.square().mean().backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, model.state_dict()


def check_lora(layout: str) -> bool:
    accelerator = Accelerator(cpu=ON_CPU, strategy=layout)
    model = make_adapted()
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
    norms = run_updates(accelerator, model, optimizer, range(4))
    expected, weights = train_by_hand(4)
    assert norms == pytest.approx(expected, abs=1e-6)
    for name, value in gather_weights(model).items():
        torch.testing.assert_close(value, weights[name], atol=1e-6, rtol=1e-5, msg=name)
    base = model.get_parameter("base_model.model.model.layers.0.mlp.up_proj.base_layer.weight")
    return is_dtensor(base) and base.to_local().numel() < base.numel()


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "tp=2", "fsdp+tp=2"])
def test_lora_matches_one_process(layout):
    for is_cut in run_ranks(check_lora, 4 if "+" in layout else 2, layout):
        assert is_cut == (layout != "ddp")


def load_base_into_shards(folder: str, layout: str) -> None:
    """Load a meta-device base before or after adapters are added, and check it and the adapters' initial values."""
    accelerator = Accelerator(cpu=ON_CPU, strategy=layout)
    for is_first in (True, False):
        with torch.device("meta"):
            model: Any = make_two_head_llama(True)
        if is_first:
            accelerator.load_weights(model, folder)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=EVERY))
        if not is_first:
            accelerator.load_weights(model.get_base_model(), folder)
        found = gather_weights(accelerator.prepare(model))
        expected = make_adapted().state_dict()
        for name, value in found.items():
            if "lora_B" in name:
                assert not value.any(), name
            elif "lora_A" in name:
                assert 0 < float(value.abs().max()) <= 1 / value.shape[1] ** 0.5, name
            else:
                assert torch.equal(value, expected[name]), name
        accelerator.free_memory()


@pytest.mark.parametrize("layout", ["fsdp", "tp=2"])
def test_base_is_loaded_into_shards_with_new_adapters(tmp_path, layout):
    build_seeded(0, lambda: make_two_head_llama(True)).save_pretrained(tmp_path)
    run_ranks(load_base_into_shards, 2, str(tmp_path), layout)


# -------------------------------------------------------------------- checkpoints without the base


def save_after_two_updates(folder: str, layout: str) -> None:
    project = ProjectConfiguration(folder, save_frozen=False)
    accelerator = Accelerator(cpu=ON_CPU, strategy=layout, project_config=project)
    model = make_adapted()
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
    run_updates(accelerator, model, optimizer, range(2))
    accelerator.save_state(Path(folder, "half"))
    accelerator.save_state(Path(folder, "again"))  # with digests that the first save has computed


def resume_after_two_updates(folder: str, layout: str) -> None:
    accelerator = Accelerator(cpu=ON_CPU, strategy=layout)
    model = make_adapted(base=5)
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
    before = gather_weights(model)
    with pytest.raises(
        CheckpointError, match=r"16 of 21 differ from this model's.*embed_tokens.*Build the model on the base"
    ):
        accelerator.load_state(Path(folder, "half"))
    assert all(torch.equal(value, before[name]) for name, value in gather_weights(model).items())
    accelerator.free_memory()
    model = make_adapted()
    with torch.no_grad():  # change one element of the base
        model.get_parameter("base_model.model.model.norm.weight")[3] += 1e-6
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
    with pytest.raises(CheckpointError, match=r"1 of 21 differ from this model's weights.*norm.weight"):
        accelerator.load_state(Path(folder, "half"))
    accelerator.free_memory()
    model = make_adapted()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.zero_()
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
    accelerator.load_state(Path(folder, "again"))
    norms = run_updates(accelerator, model, optimizer, range(2, 4))
    assert norms == pytest.approx(train_by_hand(4)[0][2:], abs=1e-6)


@pytest.mark.parametrize(("saved", "loaded"), [("ddp", "fsdp"), ("fsdp", "tp=2"), ("tp=2", "ddp")])
def test_adapter_checkpoint_requires_its_base_and_loads_in_other_layouts(tmp_path, saved, loaded):
    run_ranks(save_after_two_updates, 2, str(tmp_path), saved)
    run_ranks(resume_after_two_updates, 2, str(tmp_path), loaded)


def measure_checkpoint(folder: str) -> tuple[int, int]:
    """Return the size of the adapter and of the checkpoint, in bytes."""
    project = ProjectConfiguration(folder, save_frozen=False)
    accelerator = Accelerator(cpu=ON_CPU, strategy="fsdp", project_config=project)
    base = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024, bias=False)) for _ in range(8)))
    model = peft.get_peft_model(base, peft.LoraConfig(r=32, target_modules=[f"{n}.0" for n in range(8)]))
    model = accelerator.prepare(model)
    accelerator.save_state(Path(folder, "state"))
    size = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    accelerator.wait_for_everyone()
    return size, sum(file.stat().st_size for file in Path(folder, "state").rglob("*") if file.is_file())


def test_checkpoint_is_as_small_as_its_adapters(tmp_path):
    for adapter, checkpoint in run_ranks(measure_checkpoint, 2, str(tmp_path)):
        assert adapter < checkpoint <= 1.1 * adapter, (adapter, checkpoint)


# -------------------------------------------------------------------- merged adapters


def make_variant(kind: str) -> Any:
    """Return a bf16 model: "plain", "tied" (adapted embedding tied to the head), or "head" (a fully trained head)."""
    model: Any = build_seeded(0, lambda: make_two_head_llama(kind == "tied")).bfloat16()
    targets = [*EVERY, *(["embed_tokens"] if kind == "tied" else [])]
    more: dict[str, Any] = {"modules_to_save": ["lm_head"], "use_dora": True} if kind == "head" else {}
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, **more))
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def check_merged(layout: str) -> None:
    accelerator = Accelerator(cpu=ON_CPU, strategy=layout)
    for kind in ("plain",) if layout == "tp=2" else ("plain", "tied", "head"):
        expected = make_variant(kind).merge_and_unload().state_dict()
        model = accelerator.prepare(make_variant(kind))
        before = gather_weights(model)
        stream = accelerator.stream_weights(model, "6KiB", merge_adapters=True)
        found = {name: tensor.clone() for bucket in stream for name, tensor in bucket}
        tied = {"lm_head.weight"} if kind == "tied" else set()
        assert found.keys() == expected.keys() - tied == {name for name, *_ in stream.metadata}
        for name, value in found.items():
            same = torch.equal(value, expected[name]) if accelerator.is_main_process else value.is_meta
            assert same, (layout, kind, name)
        after = gather_weights(model)
        assert all(each.is_meta or torch.equal(each, before[name]) for name, each in after.items())
        accelerator.free_memory()
    if layout == "ddp":
        with pytest.raises(UnsupportedError, match="Sequential has no adapters that PEFT could merge"):
            accelerator.stream_weights(accelerator.prepare(nn.Sequential(nn.Linear(2, 2))), merge_adapters=True)


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "tp=2", "pp=2"])
def test_merged_adapters_equal_those_of_peft(layout):
    run_ranks(check_merged, 2, layout, timeout=400)


def check_streamed(kind: str, folder: str) -> None:
    """Check that a weight stream yields what `save_model` writes, including packed weights and their scales."""
    accelerator = Accelerator(cpu=ON_CPU, strategy="fsdp")
    model = accelerator.prepare(make_quantized(kind))
    accelerator.save_model(model, folder)
    found = {name: each.clone() for bucket in accelerator.stream_weights(model, "6KiB") for name, each in bucket}
    expected = {name: stored.tensor() for name, stored in open_checkpoint(folder).tensors.items()}
    assert (
        found.keys()
        == expected.keys()
        == make_quantized(kind).state_dict().keys() - {"base_model.model.lm_head.weight"}
    )
    assert any("nf4" in name or "SCB" in name for name in found)
    for name, each in found.items() if accelerator.is_main_process else ():
        assert torch.equal(get_raw_bytes(each), get_raw_bytes(expected[name])), (
            name
        )  # some packed values are NaN if read as floats
    with pytest.raises(UnsupportedError, match="on quantized bases, leave it out"):
        accelerator.stream_weights(model, merge_adapters=True)


@pytest.mark.parametrize("kind", ["bitsandbytes, nf4", "bitsandbytes, int8"])
def test_streamed_quantized_bases_equal_saved_ones(tmp_path, kind):
    pytest.importorskip("bitsandbytes")
    run_ranks(check_streamed, 2, kind, str(tmp_path), timeout=400)


# -------------------------------------------------------------------- quantized bases

KINDS = ["bitsandbytes, nf4", "bitsandbytes, int8", "torchao, int8", "torchao, int4"]
CLOSE = 2e-5
"""Sums in float32 round differently."""


def make_quantized(kind: str) -> Any:
    """Return a model with LoRA on a quantized base. NF4 values are stored as float32, which FSDP requires."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = build_seeded(0, lambda: make_two_head_llama(True, **sizes))
    return add_adapters(quantize(model, kind))


def quantize(model: Any, kind: str) -> Any:
    """Quantize the linear layers of the blocks."""
    if kind.startswith("torchao"):
        from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_

        of_four_bits = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))
        quantize_(model.model.layers, Int8WeightOnlyConfig() if "int8" in kind else of_four_bits)
        return model
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
    return model


def check_quantized(kind: str, layout: str) -> tuple[bool, bool]:
    accelerator = Accelerator(cpu=ON_CPU, strategy=layout)
    model = make_quantized(kind)
    if accelerator.process_index and "int8" not in kind:  # other ranks must receive the adapters and norms of rank 0
        with torch.no_grad():
            for parameter in model.parameters():
                is_torchao = type(parameter.data).__module__.startswith("torchao")  # quantized, and without `zero_`
                if parameter.is_floating_point() and not is_torchao:
                    parameter.zero_()
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
    norms = run_updates(accelerator, model, optimizer, range(4))
    assert norms == pytest.approx(train_by_hand(4, partial(make_quantized, kind))[0], abs=1e-6)
    number = 1 if layout == "pp" and accelerator.process_index else 0  # a block of this stage
    base = model.get_parameter(f"base_model.model.model.layers.{number}.mlp.up_proj.base_layer.weight")
    return is_dtensor(base) and base.to_local().numel() < base.numel(), base.numel() == 128 * 256 // 8


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "pp", pytest.param("cp", marks=pytest.mark.matrix)])
@pytest.mark.parametrize("kind", KINDS)
def test_lora_on_a_quantized_base_matches_one_process(kind, layout):
    pytest.importorskip(kind.partition(",")[0])
    for is_cut, is_packed in run_ranks(check_quantized, 2, kind, layout):
        assert is_packed == ("nf4" in kind)
        assert is_cut == (layout in ("fsdp", "cp") and "nf4" in kind)


def train_quantized_attention_with_experts(kind: str) -> None:
    """Train LoRA on a Mixtral under ep. Only attention is quantized, because experts are not linear layers in transformers."""

    def make() -> Any:
        torch.manual_seed(0)
        config = adapters.make_base("mixtral").config
        config.hidden_size, config.num_attention_heads, config.num_key_value_heads = 64, 4, 4
        base = type(adapters.make_base("mixtral"))(config)
        base.set_experts_implementation("eager")
        torch.manual_seed(1)
        made = peft.get_peft_model(quantize(base, kind), peft.LoraConfig(r=4, target_modules=adapters.ATTENTION))
        adapters.randomize_adapters(made)
        return made

    accelerator = adapters.make_accelerator("ep")
    expected = adapters.train_by_hand(make(), updates=range(6))
    losses = adapters.train(accelerator, *adapters.prepare(accelerator, make()), range(6))
    assert losses == pytest.approx(expected, abs=CLOSE)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
def test_lora_on_quantized_attention_learns_beside_distributed_experts(kind):
    pytest.importorskip(kind.partition(",")[0])
    run_ranks(train_quantized_attention_with_experts, 2, kind, timeout=280)


def evaluate_between_updates(layout: str) -> None:
    """Evaluate between updates. On some CPUs, bitsandbytes repacks weights in eval mode, and gathered ones would not fit."""
    accelerator = Accelerator(cpu=ON_CPU, strategy=layout)
    model = make_quantized("bitsandbytes, nf4")
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
    norms = run_updates(accelerator, model, optimizer, range(1))
    outputs = []
    for _ in range(2):
        model.eval()
        with torch.no_grad():
            outputs.append(model(make_tokens(5, 4)).logits)
        model.train()
    norms += run_updates(accelerator, model, optimizer, range(1, 4))
    assert torch.equal(*outputs)
    assert norms == pytest.approx(train_by_hand(4, partial(make_quantized, "bitsandbytes, nf4"))[0], abs=1e-6)


@pytest.mark.parametrize("layout", ["fsdp", pytest.param("cp", marks=pytest.mark.matrix)])
def test_an_evaluation_does_not_change_the_training_on_four_bits(layout):
    pytest.importorskip("bitsandbytes")
    run_ranks(evaluate_between_updates, 2, layout, timeout=280)


def save_quantized(kind: str, layout: str, folder: str) -> None:
    accelerator = Accelerator(cpu=ON_CPU, strategy=layout)
    model = make_quantized(kind)
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
    run_updates(accelerator, model, optimizer, range(2))
    accelerator.save_state(Path(folder, "state"), blocking=True)
    accelerator.save_model(model, Path(folder, "model"))
    model.save_pretrained(Path(folder, "adapter"), is_main_process=accelerator.is_main_process)


def resume_from_zeroed_weights(kind: str, layout: str, folder: str) -> None:
    """Resume with zeros in the adapters and the base's scales, so that both must come from the checkpoint."""
    accelerator = Accelerator(cpu=ON_CPU, strategy=layout)
    model = make_quantized(kind)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for inner, each in split_wrappers([(name, parameter.detach())]):
                if "lora" in inner or inner.endswith("scale"):
                    each.zero_()
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
    accelerator.load_state(Path(folder, "state"))
    norms = run_updates(accelerator, model, optimizer, range(2, 4))
    assert norms == pytest.approx(train_by_hand(4, partial(make_quantized, kind))[0][2:], abs=CLOSE)


@pytest.mark.parametrize(
    ("saved", "loaded", "kind"),
    [
        *(
            pytest.param(saved, loaded, kind, marks=pytest.mark.matrix)
            for saved, loaded in (("ddp", "fsdp"), ("pp", "ddp"), ("fsdp", "fsdp"), ("fsdp", "pp"))
            for kind in KINDS
        ),
    ],
)
def test_a_quantized_base_is_saved_and_loaded_in_other_layouts(tmp_path, saved, loaded, kind):
    pytest.importorskip(kind.partition(",")[0])
    run_ranks(save_quantized, 2, kind, saved, str(tmp_path), timeout=280)
    run_ranks(resume_from_zeroed_weights, 2, kind, loaded, str(tmp_path), timeout=280)
    plain = make_quantized(kind)
    _, weights = train_by_hand(2, lambda: plain)
    expected = dict(split_wrappers((name, each) for name, each in weights.items() if "lm_head" not in name))
    found = {name: stored.tensor() for name, stored in open_checkpoint(tmp_path / "model").tensors.items()}
    assert found.keys() >= expected.keys()
    for name, value in expected.items():
        if "base_layer" in name:  # frozen, and some packed values are NaN if read as floats
            assert torch.equal(get_raw_bytes(found[name]), get_raw_bytes(value)), name
        else:
            torch.testing.assert_close(found[name], value, atol=CLOSE, rtol=1e-5, msg=lambda text: f"{name}: {text}")
    with torch.no_grad():
        expected_logits = plain(make_tokens(9, 4)).logits
        # On some CPUs, bitsandbytes computes in bfloat16 in eval mode, which `from_pretrained` sets.
        opened = peft.PeftModel.from_pretrained(plain.unload(), tmp_path / "adapter").train()
        torch.testing.assert_close(opened(make_tokens(9, 4)).logits, expected_logits, atol=CLOSE, rtol=1e-4)


def load_quantized_base(kind: str, layout: str, folder: str) -> list[list[float]]:
    """Load a quantized base before and after `prepare`, into models with other scales. Return the norms of updates."""
    norms = []
    for is_prepared in (False, True):
        accelerator = Accelerator(cpu=ON_CPU, strategy=layout)
        model = make_quantized(kind)
        with torch.no_grad():
            for module in model.modules():
                for scales in (getattr(module, "quant_state", None), getattr(module, "weight", None)):
                    for name in ("absmax", "SCB"):
                        if isinstance(getattr(scales, name, None), torch.Tensor):
                            getattr(scales, name).mul_(3)
        optimizer = make_optimizer(model)
        if is_prepared:
            model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.load_weights(model.get_base_model(), folder)
        if not is_prepared:
            model, optimizer = accelerator.prepare(model, optimizer)
        norms.append(run_updates(accelerator, model, optimizer, range(2)))
        accelerator.free_memory()
    return norms


@pytest.mark.parametrize("layout", ["ddp", "fsdp", pytest.param("pp", marks=pytest.mark.matrix)])
@pytest.mark.parametrize("kind", ["bitsandbytes, nf4", "bitsandbytes, int8"])
def test_weights_of_a_quantized_base_are_loaded_with_their_scales(tmp_path, kind, layout):
    pytest.importorskip("bitsandbytes")
    base = make_quantized(kind).unload()
    base.lm_head.weight = nn.Parameter(base.lm_head.weight.detach().clone())  # safetensors accepts no tied tensors
    save_file({name: each.contiguous() for name, each in base.state_dict().items()}, tmp_path / "model.safetensors")
    expected = train_by_hand(2, partial(make_quantized, kind))[0]
    for before_and_after in run_ranks(load_quantized_base, 2, kind, layout, str(tmp_path), timeout=280):
        for norms in before_and_after:
            assert norms == pytest.approx(expected, abs=CLOSE)


def check_refusal_of_quantized(kind: str) -> None:
    """Check that `prepare` refuses quantized layers under tp, with the default plan and with one that names them."""
    for plan in (None, {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}):
        options = TensorParallelOptions(plan=plan)
        accelerator = Accelerator(cpu=ON_CPU, strategy="tp", kwargs_handlers=[options])
        match = r"_proj' .*because its weight is quantized.*one of the layouts fsdp, ddp and pp"
        with pytest.raises(PrepareError, match=match):
            accelerator.prepare(make_quantized(kind))
        accelerator.end_training()


@pytest.mark.parametrize("kind", KINDS)
def test_tensor_parallelism_refuses_quantized_weights(kind):
    pytest.importorskip(kind.partition(",")[0])
    run_ranks(check_refusal_of_quantized, 2, kind)


# -------------------------------------------------------------------- every method in every layout


Cell = tuple[str, str]


def train_cells(layout: str, expected: bytes) -> dict[Cell, dict[str, torch.Tensor] | str]:
    """Return this rank's adapters after twenty updates for each model and method, or the error of `prepare`."""
    results: dict[Cell, dict[str, torch.Tensor] | str] = {}
    references: dict[Cell, adapters.Reference] = torch.load(io.BytesIO(expected), weights_only=False)
    for cell, reference in references.items():
        accelerator = adapters.make_accelerator(layout)
        try:
            model, optimizer = adapters.prepare(accelerator, adapters.make_adapted(*cell))
        except PrepareError as error:
            results[cell] = str(error)
            accelerator.free_memory()
            continue
        losses = adapters.train(accelerator, model, optimizer)
        assert losses == pytest.approx(reference.losses, abs=adapters.CLOSE), (layout, cell)
        found = adapters.gather_parameters(accelerator, model)
        final = {name: value for name, value in reference.final.items() if layout != "pp" or name in found}
        assert not adapters.find_differences(found, final), (layout, cell)
        for name, value in found.items():
            if "ranknum" in name:  # AdaLoRA's rank numbers are trainable, but hardly change
                continue
            moved = float((value - reference.initial[name]).abs().max())
            assert moved > 100 * adapters.CLOSE if name in reference.trained else moved == 0, (layout, cell, name)
        results[cell] = {name: found[name] for name in final if name in reference.trained}
        accelerator.free_memory()
    return results


@pytest.mark.parametrize(
    ("layout", "only"),
    [("ep", "LoRA of experts"), *(pytest.param(each, None, marks=pytest.mark.matrix) for each in adapters.LAYOUTS)],
)
def test_adapters_match_one_process_and_are_equal_on_all_ranks(layout, only):
    cells = [(model, method) for model, methods in adapters.CELLS[layout].items() for method in methods]
    expected = {cell: adapters.compute_reference(*cell) for cell in cells if only in (None, cell[1])}
    packed = io.BytesIO()
    torch.save(expected, packed)
    results = run_ranks(train_cells, adapters.LAYOUTS[layout], layout, packed.getvalue(), timeout=280)
    for cell in expected:
        first = results[0][cell]
        assert isinstance(first, str) == adapters.is_refused(cell[1], layout), (cell, first)
        if not isinstance(first, str):  # pipeline stages hold different adapters
            assert {name for result in results for name in result[cell]} == expected[cell].trained
        for result in results[1:]:
            if isinstance(first, str):
                assert result[cell] == first
                hint = adapters.HINTS.get(cell[1], "Use LoRA or rsLoRA, or one of the layouts fsdp, ddp, ep and pp")
                assert hint in first
            else:  # exactly equal: gathered shards are the same on all ranks, and copies must not differ
                assert layout == "pp" or result[cell].keys() == first.keys()
                assert all(torch.equal(value, first[name]) for name, value in result[cell].items() if name in first)


# -------------------------------------------------------------------- PEFT's own methods on a prepared model


def check_save_pretrained(layout: str, folder: str, model: str, method: str) -> None:
    """Call `save_pretrained` on all ranks after four updates, and load its files into a plain and a prepared model."""
    accelerator = adapters.make_accelerator(layout)
    prepared, optimizer = adapters.prepare(accelerator, adapters.make_adapted(model, method))
    adapters.train(accelerator, prepared, optimizer, range(4))
    prepared.save_pretrained(folder, is_main_process=accelerator.is_main_process)
    accelerator.wait_for_everyone()
    plain = adapters.make_adapted(model, method)
    adapters.train_by_hand(plain, updates=range(4))
    expected = adapters.read_logits(plain)
    opened = peft.PeftModel.from_pretrained(adapters.make_base(model), folder)
    torch.testing.assert_close(adapters.read_logits(opened), expected, atol=adapters.CLOSE, rtol=0)
    other = accelerator.prepare(adapters.make_adapted(model, method, seed=7))
    assert float((adapters.read_logits(other) - expected).abs().max()) > 0.01
    other.load_adapter(folder, "default")
    torch.testing.assert_close(adapters.read_logits(other), expected, atol=adapters.CLOSE, rtol=0)
    accelerator.free_memory()


def make_model_with_two_adapters(method: str = "LoRA") -> Any:
    model = adapters.make_adapted("llama", method)
    torch.manual_seed(5)
    model.add_adapter("other", adapters.METHODS[method]("llama"))
    return model


def list_lora(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if "lora_" in name]


def switch_adapters(layout: str, folder: str) -> None:
    """Train two adapters in alternation, and check that each is saved under its name."""
    options = [DistributedDataParallelKwargs(find_unused_parameters=True)] if layout == "ddp" else []
    accelerator = adapters.make_accelerator(layout, kwargs_handlers=options)
    plain, model = make_model_with_two_adapters(), make_model_with_two_adapters()
    if layout == "ddp":  # DDP reduces only parameters that are trainable in `prepare`
        for parameter in list_lora(model):
            parameter.requires_grad_(True)
    by_hand = adapters.make_optimizer(list_lora(plain))
    model, optimizer = accelerator.prepare(model, adapters.make_optimizer(list_lora(model)))
    for number, name in enumerate(["default", "other", "default", "other"]):
        plain.set_adapter(name)
        model.set_adapter(name)
        updates = [2 * number, 2 * number + 1]
        expected = adapters.train_by_hand(plain, by_hand, updates)
        assert adapters.train(accelerator, model, optimizer, updates) == pytest.approx(expected, abs=adapters.CLOSE)
    assert not adapters.find_differences(adapters.gather_parameters(accelerator, model), dict(plain.named_parameters()))
    model.save_pretrained(folder, is_main_process=accelerator.is_main_process)
    accelerator.wait_for_everyone()
    opened = peft.PeftModel.from_pretrained(adapters.make_base("llama"), Path(folder, "other"))
    expected = adapters.read_logits(plain)
    torch.testing.assert_close(adapters.read_logits(opened), expected, atol=adapters.CLOSE, rtol=0)
    accelerator.free_memory()


def compare_with_base(model: Any, rows: torch.Tensor) -> torch.Tensor:
    """Return a loss that also needs the outputs without adapters, as DPO's loss does."""
    with torch.no_grad(), model.disable_adapter():
        reference = model(input_ids=rows).logits
    out = model(input_ids=rows, labels=rows)
    return out.loss + 0.1 * (out.logits - reference).square().mean()  # type: ignore[no-any-return]


def disable_adapters(layout: str) -> None:
    accelerator = adapters.make_accelerator(layout)
    plain = adapters.make_adapted("llama", "LoRA")
    model, optimizer = adapters.prepare(accelerator, adapters.make_adapted("llama", "LoRA"))
    expected = adapters.train_by_hand(plain, updates=range(4), loss_of=compare_with_base)
    losses = adapters.train(accelerator, model, optimizer, range(4), compare_with_base)
    assert losses == pytest.approx(expected, abs=adapters.CLOSE)
    accelerator.free_memory()


def train_on_bf16_base(layout: str) -> None:
    """Train a frozen bf16 base with float32 adapters, which PEFT creates for such a base."""
    accelerator = adapters.make_accelerator(layout)
    plain, model = (adapters.make_adapted("llama", "LoRA", dtype=torch.bfloat16) for _ in range(2))
    expected = adapters.train_by_hand(plain, updates=range(4))
    model, optimizer = adapters.prepare(accelerator, model)
    losses = adapters.train(accelerator, model, optimizer, range(4))
    assert losses == pytest.approx(expected, abs=1e-2)
    assert {parameter.dtype for parameter in adapters.list_trainable(model)} == {torch.float32}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32, torch.bfloat16}
    accelerator.free_memory()


def recompute_activations(layout: str, is_reentrant: bool) -> None:
    accelerator = adapters.make_accelerator(layout)

    def make() -> Any:
        base = adapters.make_base("llama")
        base.enable_input_require_grads()
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": is_reentrant})
        torch.manual_seed(1)
        return peft.get_peft_model(base, adapters.METHODS["LoRA"]("llama"))

    expected = adapters.train_by_hand(make(), updates=range(3))
    model, optimizer = adapters.prepare(accelerator, make())
    losses = adapters.train(accelerator, model, optimizer, range(3))
    assert losses == pytest.approx(expected, abs=adapters.CLOSE)
    accelerator.free_memory()


def refuse_changes(layout: str) -> None:
    """Check that operations impossible on shards raise errors that name an alternative."""
    accelerator = adapters.make_accelerator(layout)
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
    if "tp" in layout:  # otherwise, the following part would combine a whole adapter with split activations
        accelerator.free_memory()
        return
    adapters.train(accelerator, model, optimizer, range(1))
    layer = model.base_model.model.model.layers[0].self_attn.q_proj  # add an adapter without PEFT's `add_adapter`
    layer.lora_A["other"] = nn.Linear(16, 2, bias=False, dtype=torch.float64)
    layer.lora_B["other"] = nn.Linear(2, 16, bias=False, dtype=torch.float64)
    layer.lora_dropout["other"], layer.scaling["other"] = nn.Identity(), 1.0
    layer.set_adapter(["default", "other"])
    optimizer.add_param_group({"params": [layer.lora_A["other"].weight, layer.lora_B["other"].weight]})
    with pytest.raises(PrepareError, match=r"has 2 parameters .* Add layers and adapters before prepare"):
        adapters.train(accelerator, model, optimizer, range(1, 3))
    accelerator.free_memory()


def add_to_replicas() -> None:
    """Check that under DDP, adapters added after `prepare` raise an error until the model is prepared again."""
    accelerator = adapters.make_accelerator("ddp")
    model, _ = adapters.prepare(accelerator, adapters.make_adapted("llama", "LoRA"))
    model.add_adapter("other", adapters.METHODS["LoRA"]("llama"))
    model.set_adapter("other")
    late = accelerator.prepare(adapters.make_optimizer(adapters.list_trainable(model)))
    with pytest.raises(PrepareError, match=r"Add layers and adapters before prepare"):
        adapters.train(accelerator, model, late, range(1))
    accelerator.free_memory()
    model.zero_grad()
    model, optimizer = adapters.prepare(accelerator, model)
    plain = make_model_with_two_adapters()
    with torch.no_grad():
        for parameter, own in zip(model.parameters(), plain.parameters(), strict=True):
            own.copy_(parameter)
    plain.set_adapter("other")
    losses = adapters.train(accelerator, model, optimizer, range(3))
    assert losses == pytest.approx(adapters.train_by_hand(plain, updates=range(3)), abs=adapters.CLOSE)
    merged = model.merge_and_unload()
    torch.testing.assert_close(adapters.read_logits(merged), adapters.read_logits(plain), atol=adapters.CLOSE, rtol=0)
    accelerator.free_memory()


def check_documented_uses(layout: str, folder: str) -> None:
    for method in ("LoRA", *(() if "tp" in layout else ("DoRA", "LoRA with modules_to_save")), "prompt tuning"):
        check_save_pretrained(layout, f"{folder}/{method}", "llama", method)
    switch_adapters(layout, f"{folder}/two")
    disable_adapters(layout)
    train_on_bf16_base(layout)
    recompute_activations(layout, is_reentrant=False)
    recompute_activations(layout, is_reentrant=True)
    if layout == "ddp":
        add_to_replicas()
    else:
        refuse_changes(layout)


@pytest.mark.parametrize(
    "layout",
    [pytest.param("fsdp", marks=pytest.mark.slow), *(pytest.param(n, marks=pytest.mark.matrix) for n in ("ddp", "tp"))],
)
def test_prepared_model_works_as_peft_documents(tmp_path, layout):
    run_ranks(check_documented_uses, 2, layout, str(tmp_path), timeout=280)


def save_and_merge_experts(folder: str) -> None:
    check_save_pretrained("ep", folder, "mixtral", "LoRA of experts")
    accelerator = adapters.make_accelerator("ep")
    expected = adapters.make_adapted("mixtral", "LoRA of experts").merge_and_unload().state_dict()
    model = accelerator.prepare(adapters.make_adapted("mixtral", "LoRA of experts"))
    stream = accelerator.stream_weights(model, "6KiB", merge_adapters=True)
    found = {name: tensor.clone() for bucket in stream for name, tensor in bucket}
    assert found.keys() == expected.keys()
    for name, value in found.items() if accelerator.is_main_process else ():
        torch.testing.assert_close(value, expected[name], msg=name)


@pytest.mark.matrix
def test_adapters_of_distributed_experts_are_saved_opened_and_merged(tmp_path):
    run_ranks(save_and_merge_experts, 2, str(tmp_path), timeout=280)


def resume(saved: str, loaded: str, folder: str, model: str, method: str) -> None:
    project = ProjectConfiguration(folder, save_frozen=False)
    accelerator = adapters.make_accelerator(saved, project_config=project)
    prepared, optimizer = adapters.prepare(accelerator, adapters.make_adapted(model, method))
    adapters.train(accelerator, prepared, optimizer, range(3))
    accelerator.save_state(Path(folder, "state"))
    accelerator.end_training()
    accelerator = adapters.make_accelerator(loaded)
    prepared, optimizer = adapters.prepare(accelerator, adapters.make_adapted(model, method, seed=7))
    accelerator.load_state(Path(folder, "state"))
    losses = adapters.train(accelerator, prepared, optimizer, range(3, 6))
    expected = adapters.train_by_hand(adapters.make_adapted(model, method), updates=range(6))
    assert losses == pytest.approx(expected[3:], abs=adapters.CLOSE)
    accelerator.free_memory()


def resume_each(folder: str) -> None:
    resume("fsdp", "ddp", f"{folder}/1", "llama", "DoRA")
    resume("tp", "fsdp", f"{folder}/2", "llama", "LoRA with modules_to_save")
    resume("ep", "fsdp", f"{folder}/3", "mixtral", "LoRA of experts")
    resume("fsdp", "ep", f"{folder}/4", "mixtral", "LoRA of experts")


@pytest.mark.matrix
def test_adapters_resume_in_another_layout(tmp_path):
    run_ranks(resume_each, 2, str(tmp_path), timeout=280)


def test_docs_page_contains_the_generated_table():
    page = Path(__file__).parents[2] / "docs" / "adapters.md"
    assert adapters.write_table() in page.read_text()
