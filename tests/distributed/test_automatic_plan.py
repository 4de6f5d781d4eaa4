"""Models without a tensor-parallel plan, split by a plan derived from their structure, compared with whole models."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headway import Accelerator, TensorParallelOptions
from headway.core.strategies.fully_sharded.dtensors import get_local_shard
from headway.layouts.tensor.tensor_parallel import TensorParallel
from tests.devices import ON_CPU
from tests.distributed.ranks import run_ranks
from tests.distributed.test_tensor_parallel import gather, make_mesh
from tests.sweep.models import CASES

DEFAULT = TensorParallelOptions()
SEQUENCE_PARALLEL = replace(DEFAULT, sequence_parallel=True)
SEQUENCE_PARALLEL_MODELS = ("GPT-2", "BERT", "RoBERTa", "DistilBERT", "T5", "BART", "Whisper")


def make_model(name: str) -> nn.Module:
    """Return a model whose parameters, including biases and position tables, all have values of the same magnitude."""
    model = CASES[name].make()
    for seed, parameter in enumerate(model.parameters()):
        values = 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        parameter.data.copy_(values + (1.0 if parameter.dim() == 1 else 0.0))
    return model.train()


def compute_gradients(name: str, model: nn.Module) -> tuple[float, dict[str, torch.Tensor]]:
    loss, count = CASES[name].loss(model, *(each[:4] for each in CASES[name].rows()))
    (loss / count).backward()
    return float(gather(loss.detach())), {n: gather(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def measure_difference(name: str, options: TensorParallelOptions) -> float:
    whole, cut = make_model(name), make_model(name)
    state = torch.get_rng_state()
    TensorParallel(cut, make_mesh(), options)
    assert torch.equal(state, torch.get_rng_state())
    assert any(get_local_shard(p).shape != p.shape for p in cut.parameters())
    (loss, expected), (cut_loss, grads) = compute_gradients(name, whole), compute_gradients(name, cut)
    assert expected.keys() == grads.keys()
    largest = max(float(g.abs().max()) for g in expected.values())
    return max(abs(loss - cut_loss) / loss, *(float((expected[n] - grads[n]).abs().max()) / largest for n in expected))


def measure_all_differences() -> dict[str, float]:
    found = {name: measure_difference(name, DEFAULT) for name in ("GPT-2", "BERT", "T5", "Whisper", "Swin")}
    found |= {f"{name}, sequences": measure_difference(name, SEQUENCE_PARALLEL) for name in SEQUENCE_PARALLEL_MODELS}
    return found


def test_gradients_equal_those_of_the_whole_model() -> None:
    found = run_ranks(measure_all_differences, 2, timeout=300)[0]
    assert all(difference < 5e-6 for difference in found.values()), found


def make_lora(name: str) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    where = {"GPT-2": ["c_attn", "c_proj"], "T5": ["q", "v", "wo"]}[name]
    chosen = LoraConfig(r=4, target_modules=where, fan_in_fan_out=name == "GPT-2", init_lora_weights=False)
    return get_peft_model(make_model(name), chosen)  # type: ignore[arg-type, return-value]


def train(
    layout: str | None,
    name: str,
    options: TensorParallelOptions = DEFAULT,
    save: str = "",
    load: str = "",
    is_lora: bool = False,
) -> list[float]:
    """Train four updates and return their losses. With `save`, a checkpoint is saved after the second; `load` continues there."""
    accelerator = Accelerator(cpu=ON_CPU, strategy=layout, kwargs_handlers=[options] if layout else [])
    torch.manual_seed(0)
    model = make_lora(name) if is_lora else make_model(name)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.05, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    found = []
    if load:
        accelerator.load_state(load)
    for number in range(2 if load else 0, 4):
        if save and number == 2:
            accelerator.save_state(save)
        loss, count = CASES[name].loss(model, *(each[number * 4 : number * 4 + 4] for each in CASES[name].rows()))
        accelerator.backward(loss / count)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(gather(loss.detach())) / count)
    accelerator.end_training()
    return found


def train_and_save(layout: str | None, folder: str) -> dict[str, list[float]]:
    return {name: train(layout, name, save=f"{folder}/{name}") for name in ("GPT-2", "T5")}


def train_from_checkpoint(layout: str | None, folder: str) -> dict[str, list[float]]:
    return {name: train(layout, name, load=f"{folder}/{name}") for name in ("GPT-2", "T5")}


@pytest.mark.parametrize(
    ("first", "second"), [((None, 1), ("tp", 2)), (("tp", 2), (None, 1)), (("fsdp+tp=2", 4), ("tp", 2))]
)
def test_checkpoints_load_in_other_layouts(first: Any, second: Any, tmp_path: Path) -> None:
    expected = run_ranks(train_and_save, first[1], first[0], str(tmp_path), timeout=240)[0]
    found = run_ranks(train_from_checkpoint, second[1], second[0], str(tmp_path), timeout=240)[0]
    for name in expected:
        assert found[name] == pytest.approx(expected[name][2:], rel=2e-6), name


def train_lora(layout: str | None) -> dict[str, list[float]]:
    return {name: train(layout, name, is_lora=True) for name in ("GPT-2", "T5")}


def test_lora_adapters_are_split_with_their_layers() -> None:
    expected, found = run_ranks(train_lora, 1, None)[0], run_ranks(train_lora, 2, "tp")[0]
    for name in expected:
        assert expected[name][3] < expected[name][0]
        assert found[name] == pytest.approx(expected[name], rel=1e-5), name


def train_with_loss_parallel() -> list[list[float]]:
    options = replace(SEQUENCE_PARALLEL, loss_parallel=True)
    return [train("tp", name, each) for name in ("GPT-2", "T5", "Whisper") for each in (DEFAULT, options)]


def test_loss_parallel_matches_gathered_logits() -> None:
    found = run_ranks(train_with_loss_parallel, 2, timeout=240)[0]
    for whole, cut in zip(found[::2], found[1::2], strict=True):
        assert cut == pytest.approx(whole, rel=5e-6)


def generate(name: str, model: Any) -> list[int]:
    first = CASES[name].rows()[0][:2]
    given = {"input_features" if name == "Whisper" else "input_ids": first}
    out = model.eval().generate(**given, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)
    return out.flatten().tolist()  # type: ignore[no-any-return]


def generate_whole_and_split() -> dict[str, tuple[list[int], list[int]]]:
    found = {}
    for name in ("GPT-2", "T5", "Whisper"):
        whole, cut = make_model(name), make_model(name)
        TensorParallel(cut, make_mesh(), DEFAULT)
        found[name] = (generate(name, whole), generate(name, cut))
    return found


def test_generation_yields_the_tokens_of_the_whole_model() -> None:
    for name, (whole, cut) in run_ranks(generate_whole_and_split, 2, timeout=240)[0].items():
        assert whole == cut, name


def train_with_dropout(options: TensorParallelOptions) -> dict[str, list[float]]:
    found = {}
    for name in ("BERT", "T5"):
        model = make_model(name)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.5
        TensorParallel(model, make_mesh(), options)
        torch.manual_seed(3)
        loss, grads = compute_gradients(name, model)
        found[name] = [loss, *(float(each.norm()) for each in grads.values()), float(torch.rand(()))]
    return found


@pytest.mark.parametrize("options", [DEFAULT, SEQUENCE_PARALLEL])
def test_ranks_agree_with_dropout(options: TensorParallelOptions) -> None:
    one, other = run_ranks(train_with_dropout, 2, options, timeout=240)
    assert one == other
    (plain,) = run_ranks(compute_losses_without_dropout, 1)
    assert all(one[name][0] != plain[name] for name in plain)


def compute_losses_without_dropout() -> dict[str, float]:
    return {name: compute_gradients(name, make_model(name))[0] for name in ("BERT", "T5")}
