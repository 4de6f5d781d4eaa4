"""Models without a tensor-parallel plan, split by one that is found in their structure, beside the whole models."""

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
from tests.distributed.test_tensor_parallel import full, mesh
from tests.sweep.models import CASES

OWN = TensorParallelOptions()
ON_PARTS = replace(OWN, sequence_parallel=True)
WITH_PARTS = ("GPT-2", "BERT", "RoBERTa", "DistilBERT", "T5", "BART", "Whisper")


def made(name: str) -> nn.Module:
    """A model whose values are all of one size: biases and tables of positions too."""
    model = CASES[name].make()
    for seed, parameter in enumerate(model.parameters()):
        values = 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        parameter.data.copy_(values + (1.0 if parameter.dim() == 1 else 0.0))
    return model.train()


def run_of(name: str, model: nn.Module) -> tuple[float, dict[str, torch.Tensor]]:
    loss, count = CASES[name].loss(model, *(each[:4] for each in CASES[name].rows()))
    (loss / count).backward()
    return float(full(loss.detach())), {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def apart(name: str, options: TensorParallelOptions) -> float:
    whole, cut = made(name), made(name)
    state = torch.get_rng_state()
    TensorParallel(cut, mesh(), options)
    assert torch.equal(state, torch.get_rng_state())
    assert any(get_local_shard(p).shape != p.shape for p in cut.parameters())
    (loss, wanted), (cut_loss, grads) = run_of(name, whole), run_of(name, cut)
    assert wanted.keys() == grads.keys()
    largest = max(float(g.abs().max()) for g in wanted.values())
    return max(abs(loss - cut_loss) / loss, *(float((wanted[n] - grads[n]).abs().max()) / largest for n in wanted))


def all_apart() -> dict[str, float]:
    found = {name: apart(name, OWN) for name in ("GPT-2", "BERT", "T5", "Whisper", "Swin")}
    found |= {f"{name}, sequences": apart(name, ON_PARTS) for name in WITH_PARTS}
    return found


def test_gradients_are_those_of_the_whole_model() -> None:
    found = run_ranks(all_apart, 2, timeout=300)[0]
    assert all(off < 5e-6 for off in found.values()), found


def lora(name: str) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    where = {"GPT-2": ["c_attn", "c_proj"], "T5": ["q", "v", "wo"]}[name]
    chosen = LoraConfig(r=4, target_modules=where, fan_in_fan_out=name == "GPT-2", init_lora_weights=False)
    return get_peft_model(made(name), chosen)  # type: ignore[arg-type, return-value]


def losses(
    layout: str | None,
    name: str,
    options: TensorParallelOptions = OWN,
    save: str = "",
    load: str = "",
    is_lora: bool = False,
) -> list[float]:
    """Of four updates; saved after the second."""
    accelerator = Accelerator(cpu=ON_CPU, strategy=layout, kwargs_handlers=[options] if layout else [])
    torch.manual_seed(0)
    model = lora(name) if is_lora else made(name)
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
        found.append(float(full(loss.detach())) / count)
    accelerator.end_training()
    return found


def saved_and_trained(layout: str | None, folder: str) -> dict[str, list[float]]:
    return {name: losses(layout, name, save=f"{folder}/{name}") for name in ("GPT-2", "T5")}


def loaded(layout: str | None, folder: str) -> dict[str, list[float]]:
    return {name: losses(layout, name, load=f"{folder}/{name}") for name in ("GPT-2", "T5")}


@pytest.mark.parametrize(
    ("first", "second"), [((None, 1), ("tp", 2)), (("tp", 2), (None, 1)), (("fsdp+tp=2", 4), ("tp", 2))]
)
def test_checkpoints_go_into_other_layouts_and_come_from_them(first: Any, second: Any, tmp_path: Path) -> None:
    wanted = run_ranks(saved_and_trained, first[1], first[0], str(tmp_path), timeout=240)[0]
    found = run_ranks(loaded, second[1], second[0], str(tmp_path), timeout=240)[0]
    for name in wanted:
        assert found[name] == pytest.approx(wanted[name][2:], rel=2e-6), name


def adapted(layout: str | None) -> dict[str, list[float]]:
    return {name: losses(layout, name, is_lora=True) for name in ("GPT-2", "T5")}


def test_low_rank_adapters_are_split_with_what_they_adapt() -> None:
    wanted, found = run_ranks(adapted, 1, None)[0], run_ranks(adapted, 2, "tp")[0]
    for name in wanted:
        assert wanted[name][3] < wanted[name][0]
        assert found[name] == pytest.approx(wanted[name], rel=1e-5), name


def of_cut_logits() -> list[list[float]]:
    options = replace(ON_PARTS, loss_parallel=True)
    return [losses("tp", name, each) for name in ("GPT-2", "T5", "Whisper") for each in (OWN, options)]


def test_losses_of_logits_that_stay_cut() -> None:
    found = run_ranks(of_cut_logits, 2, timeout=240)[0]
    for whole, cut in zip(found[::2], found[1::2], strict=True):
        assert cut == pytest.approx(whole, rel=5e-6)


def tokens_of(name: str, model: Any) -> list[int]:
    first = CASES[name].rows()[0][:2]
    given = {"input_features" if name == "Whisper" else "input_ids": first}
    out = model.eval().generate(**given, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)
    return out.flatten().tolist()  # type: ignore[no-any-return]


def generated() -> dict[str, tuple[list[int], list[int]]]:
    found = {}
    for name in ("GPT-2", "T5", "Whisper"):
        whole, cut = made(name), made(name)
        TensorParallel(cut, mesh(), OWN)
        found[name] = (tokens_of(name, whole), tokens_of(name, cut))
    return found


def test_generation_gives_the_tokens_of_the_whole_model() -> None:
    for name, (whole, cut) in run_ranks(generated, 2, timeout=240)[0].items():
        assert whole == cut, name


def dropped(options: TensorParallelOptions) -> dict[str, list[float]]:
    found = {}
    for name in ("BERT", "T5"):
        model = made(name)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.5
        TensorParallel(model, mesh(), options)
        torch.manual_seed(3)
        loss, grads = run_of(name, model)
        found[name] = [loss, *(float(each.norm()) for each in grads.values()), float(torch.rand(()))]
    return found


@pytest.mark.parametrize("options", [OWN, ON_PARTS])
def test_ranks_stay_alike_with_dropout(options: TensorParallelOptions) -> None:
    one, other = run_ranks(dropped, 2, options, timeout=240)
    assert one == other
    (plain,) = run_ranks(quiet, 1)
    assert all(one[name][0] != plain[name] for name in plain)


def quiet() -> dict[str, float]:
    return {name: run_of(name, made(name))[0] for name in ("BERT", "T5")}
