"""Adapters of PEFT's, saved on all ranks as its documentation shows: what plain torch would save, and it opens again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headway import Accelerator
from tests.distributed.ranks import run_ranks

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

KINDS: dict[str, Any] = {
    "modules_to_save": lambda: peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], r=2),
    "tokens": lambda: peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1, 3], r=2),
    "lora": lambda: peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=2),
    "dora": lambda: peft.LoraConfig(target_modules=["q_proj"], use_dora=True, r=2),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "prompts": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
}


def base() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def adapted(kind: str) -> Any:
    model = base()
    torch.manual_seed(1)
    return peft.get_peft_model(model, KINDS[kind]())


def train(model: Any, optimizer: Any, backward: Any) -> None:
    ids = torch.arange(12).reshape(2, 6)
    for _ in range(3):
        backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()


def learning(model: Any) -> list[Any]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def save(layout: dict[str, Any], kind: str, folder: str, says_main: bool) -> int:
    accelerator = Accelerator(cpu=True, **layout)
    model = adapted(kind)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(learning(model), 0.1))
    train(model, optimizer, accelerator.backward)
    more = {"is_main_process": accelerator.is_main_process, "save_function": accelerator.save} if says_main else {}
    state = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(folder, state_dict=state, **more)
    accelerator.wait_for_everyone()
    accelerator.save_state(f"{folder}-state", weights="huggingface")
    if kind == "prompts":  # which PEFT opens for inference only
        peft.PeftModel.from_pretrained(base(), folder)
        return len(state)
    opened = peft.PeftModel.from_pretrained(base(), folder, is_trainable=True)
    again, other = accelerator.prepare(opened, torch.optim.SGD(learning(opened), 0.1))
    train(again, other, accelerator.backward)
    return len(state)


FSDP = {"strategy": "fsdp"}


@pytest.mark.parametrize(
    ("layout", "kind", "says_main"),
    [
        (FSDP, "modules_to_save", False),
        pytest.param(FSDP, "modules_to_save", True, marks=pytest.mark.matrix),
        *(pytest.param(FSDP, kind, False, marks=pytest.mark.matrix) for kind in list(KINDS)[1:]),
        pytest.param({}, "modules_to_save", True, marks=pytest.mark.matrix),
        pytest.param({"strategy": "tp"}, "lora", False, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_adapters_are_saved_by_a_call_on_all_ranks(
    layout: dict[str, Any], kind: str, says_main: bool, tmp_path: Path
) -> None:
    sizes = run_ranks(save, 2, layout, kind, str(tmp_path / "ours"), says_main)
    assert sizes[0] > 0
    assert (sizes[1] == 0) == bool(layout)
    model = adapted(kind)
    train(model, torch.optim.SGD(learning(model), 0.1), torch.Tensor.backward)
    model.save_pretrained(tmp_path / "plain")
    wanted = load_file(tmp_path / "plain" / "adapter_model.safetensors")
    for folder in ("ours", "ours-state"):
        found = load_file(tmp_path / folder / "adapter_model.safetensors")
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5, msg=name)
