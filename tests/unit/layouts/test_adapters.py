"""Checks of adapters that a layout cannot distribute, and 4-bit weights that must not be packed again."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from headway.errors import PrepareError
from headway.layouts.adapters import check_adapters, check_added_keys, keep_packing, list_adapter_types

REASON = "No rank has queries for these keys"


def make_model(*types: str) -> Any:
    model: Any = nn.Linear(2, 2)
    model.peft_config = {f"adapter {number}": SimpleNamespace(peft_type=each) for number, each in enumerate(types)}
    return model


def test_types_of_adapters_are_found_in_real_configs():
    peft = pytest.importorskip("peft")
    model = make_model()
    model.peft_config = {"one": peft.LoraConfig(), "other": peft.PrefixTuningConfig(num_virtual_tokens=2)}
    assert list_adapter_types(model) == {"LORA", "PREFIX_TUNING"}
    assert list_adapter_types(nn.Linear(2, 2)) == set()


def test_adalora_is_refused_with_layouts_that_work():
    check_adapters(make_model("LORA"), "fsdp")
    with pytest.raises(PrepareError, match=r"AdaLoRA.*under fsdp .*Use LoRA .*ddp, zero1 and zero2"):
        check_adapters(make_model("LORA", "ADALORA"), "fsdp")


@pytest.mark.parametrize("kind", ["PREFIX_TUNING", "CARTRIDGE"])
def test_adapters_that_add_keys_are_refused_with_the_reason(kind):
    check_added_keys(make_model("LORA", "PROMPT_TUNING", "P_TUNING"), REASON)
    with pytest.raises(PrepareError, match=rf"Linear has adapters of the type {kind}.*{REASON}\. Use prompt tuning"):
        check_added_keys(make_model("LORA", kind), REASON)


def test_evaluation_on_a_cpu_leaves_the_packed_values_of_four_bit_layers_as_they_are():
    bnb = pytest.importorskip("bitsandbytes.nn")
    torch.manual_seed(0)
    layer = bnb.Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    layer.load_state_dict({"weight": torch.randn(64, 64)})
    layer = layer.to("cpu")
    layer.support_avx512bf16_for_cpu = True  # as on CPUs with these instructions
    keep_packing(nn.Sequential(layer, nn.Linear(2, 2)))
    before = layer.weight.detach().clone()
    with torch.no_grad():
        layer.eval()(torch.randn(3, 64))
    assert torch.equal(layer.weight, before)
    assert not getattr(layer.weight.quant_state, "packing_format_for_cpu", False)
