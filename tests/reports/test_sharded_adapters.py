"""Tests of PEFT adapters saved on all ranks as PEFT documents: they match plain PyTorch and can be loaded again."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headway import Accelerator
from headway.core.training.full_weights import FullWeights
from headway.core.training.gathered_tensors import GatheredTensor
from tests.distributed.ranks import run_ranks

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
integrations = pytest.importorskip("transformers.integrations.peft")

KINDS: dict[str, Any] = {
    "modules_to_save": lambda: peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], r=2),
    "tokens": lambda: peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1, 3], r=2),
    "lora": lambda: peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=2),
    "dora": lambda: peft.LoraConfig(target_modules=["q_proj"], use_dora=True, r=2),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "prompts": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
}


def build_base_model() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def build_adapter_model(kind: str) -> Any:
    model = build_base_model()
    torch.manual_seed(1)
    return peft.get_peft_model(model, KINDS[kind]())


def train(model: Any, optimizer: Any, backward: Any) -> None:
    ids = torch.arange(12).reshape(2, 6)
    for _ in range(3):
        backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()


def list_trainable(model: Any) -> list[Any]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def save(layout: dict[str, Any], kind: str, folder: str, passes_main_process: bool) -> int:
    """Train and save an adapter, load it again, and train it. Return the size of this rank's state dict."""
    accelerator = Accelerator(cpu=True, **layout)
    model = build_adapter_model(kind)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(list_trainable(model), 0.1))
    train(model, optimizer, accelerator.backward)
    options = (
        {"is_main_process": accelerator.is_main_process, "save_function": accelerator.save}
        if passes_main_process
        else {}
    )
    state = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(folder, state_dict=state, **options)
    accelerator.wait_for_everyone()
    accelerator.save_state(f"{folder}-state", weights="huggingface")
    if kind == "prompts":  # PEFT loads these for inference only
        peft.PeftModel.from_pretrained(build_base_model(), folder)
        return len(state)
    opened = peft.PeftModel.from_pretrained(build_base_model(), folder, is_trainable=True)
    new_model, new_optimizer = accelerator.prepare(opened, torch.optim.SGD(list_trainable(opened), 0.1))
    train(new_model, new_optimizer, accelerator.backward)
    return len(state)


FSDP = {"strategy": "fsdp"}


@pytest.mark.parametrize(
    ("layout", "kind", "passes_main_process"),
    [
        (FSDP, "modules_to_save", False),
        pytest.param(FSDP, "modules_to_save", True, marks=pytest.mark.matrix),
        *(pytest.param(FSDP, kind, False, marks=pytest.mark.matrix) for kind in list(KINDS)[1:]),
        pytest.param({}, "modules_to_save", True, marks=pytest.mark.matrix),
        pytest.param({"strategy": "tp"}, "lora", False, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_adapters_saved_on_all_ranks_match_plain_pytorch(
    layout: dict[str, Any], kind: str, passes_main_process: bool, tmp_path: Path
) -> None:
    sizes = run_ranks(save, 2, layout, kind, str(tmp_path / "ours"), passes_main_process)
    assert sizes[0] > 0
    assert (sizes[1] == 0) == bool(layout)
    model = build_adapter_model(kind)
    train(model, torch.optim.SGD(list_trainable(model), 0.1), torch.Tensor.backward)
    model.save_pretrained(tmp_path / "plain")
    expected = load_file(tmp_path / "plain" / "adapter_model.safetensors")
    for folder in ("ours", "ours-state"):
        weights = load_file(tmp_path / folder / "adapter_model.safetensors")
        assert weights.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-5, msg=name)


def _find_adapter_refusal() -> str:
    """Return the reason why transformers refuses the installed PEFT, or "" if it accepts it.

    transformers 5.24 requires PEFT 0.22 for `add_adapter`.
    """
    try:
        integrations.check_peft_version(min_version=integrations.MIN_PEFT_VERSION)
    except ValueError as error:
        return str(error)
    return ""


def build_native_model() -> Any:
    """Return a transformers model whose adapter transformers itself has added."""
    model = build_base_model()
    torch.manual_seed(1)
    model.add_adapter(peft.LoraConfig(target_modules=["q_proj"], r=2))
    return model


BUILDERS = {"peft": partial(build_adapter_model, "lora"), "native": build_native_model}
"""Functions that return a model with an adapter that PEFT or transformers has added."""


def save_in_each_way(name: str, folder: str) -> dict[str, int]:
    """Save the adapter of a sharded model in each way. Return the numbers of values that rank 0 has gathered, by way."""
    gathered: list[int] = []
    assemble = GatheredTensor.assemble

    def record(tensor: GatheredTensor) -> torch.Tensor:
        gathered.append(tensor.shape.numel())
        return assemble(tensor)

    counts: dict[str, int] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GatheredTensor, "assemble", record)
        accelerator = Accelerator(cpu=True, strategy="fsdp")
        model = BUILDERS[name]()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(list_trainable(model), 0.1))
        train(model, optimizer, accelerator.backward)
        ways = {
            "save_pretrained": lambda folder: model.save_pretrained(folder),
            "save_state": lambda folder: accelerator.save_state(folder, weights="huggingface"),
            "trainer": lambda folder: FullWeights(accelerator.strategy, accelerator.runtime).save_adapters(
                model, folder
            ),
        }
        for way, save_to in ways.items():
            gathered.clear()
            save_to(f"{folder}/{way}")
            counts[way] = sum(gathered)
            accelerator.wait_for_everyone()
    return counts


_REFUSAL = _find_adapter_refusal()


@pytest.mark.parametrize(
    "name", ["peft", pytest.param("native", marks=pytest.mark.skipif(bool(_REFUSAL), reason=_REFUSAL or "accepted"))]
)
def test_saving_adapters_does_not_gather_the_base(tmp_path: Path, name: str) -> None:
    counts, of_other_rank = run_ranks(save_in_each_way, 2, name, str(tmp_path))
    assert not any(of_other_rank.values())
    model = BUILDERS[name]()
    train(model, torch.optim.SGD(list_trainable(model), 0.1), torch.Tensor.backward)
    model.save_pretrained(tmp_path / "plain")
    expected = load_file(tmp_path / "plain" / "adapter_model.safetensors")
    for way in ("save_pretrained", "save_state", "trainer"):
        assert counts[way] == sum(tensor.numel() for tensor in expected.values()), way
        weights = load_file(tmp_path / way / "adapter_model.safetensors")
        assert weights.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(weights[key], value, rtol=1e-3, atol=1e-5, msg=f"{way} {key}")


def save_where_a_file_is(file: str) -> str:
    """Return the name of the error that this rank gets if rank 0 cannot write the adapters."""
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    model = accelerator.prepare(build_adapter_model("lora"))
    with pytest.raises(Exception) as exc_info:  # PEFT's own error on rank 0
        FullWeights(accelerator.strategy, accelerator.runtime).save_adapters(model, file)
    return type(exc_info.value).__name__


def test_a_failed_save_of_adapters_reaches_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    names = run_ranks(save_where_a_file_is, 2, str(tmp_path / "file"))
    assert names[1] == "CheckpointError"
