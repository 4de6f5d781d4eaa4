"""`save_pretrained` of sharded models that save the models in them, as sentence-transformers does, and of models in others."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import BertConfig, BertModel

from headway import Accelerator
from headway.errors import CheckpointError, UnsupportedError
from tests.distributed.ranks import run_ranks


class Encoder(torch.nn.Module):
    """Model whose `save_pretrained` takes no state dict, and calls that of a transformers model in it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        self.bert = BertModel(BertConfig(vocab_size=16, **sizes, **dropouts), add_pooling_layer=False)
        self.head = torch.nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(self.bert(input_ids=tokens).last_hidden_state[:, 0])
        return outputs

    def save_pretrained(self, folder: str, note: str = "") -> str:
        if note == "fail":
            raise OSError("the disk is full")
        self.bert.save_pretrained(f"{folder}/bert")
        torch.save(self.head.state_dict(), f"{folder}/head.pt")
        Path(folder, "note").write_text(note)
        return note


TOKENS = torch.arange(8).reshape(2, 4)


def train_and_save(folder: str, strategy: str) -> Any:
    accelerator = Accelerator(cpu=True, strategy=strategy)
    model = Encoder()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(TOKENS).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    result = model.save_pretrained(folder, note="done")
    accelerator.wait_for_everyone()
    loss = model(TOKENS).square().mean().item()  # the model is still sharded, and all ranks can call it
    with pytest.raises((OSError, CheckpointError), match="the disk is full"):
        model.save_pretrained(folder, "fail")
    return result, loss


@pytest.mark.parametrize("strategy", ["fsdp", "tp"])
def test_modules_in_a_sharded_model_save_whole_tensors(tmp_path: Path, strategy: str) -> None:
    expected = Encoder()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    expected(TOKENS).square().mean().backward()
    optimizer.step()
    results = run_ranks(train_and_save, 2, str(tmp_path), strategy)
    assert [result for result, _ in results] == ["done", None]
    for _, loss in results:
        assert loss == pytest.approx(expected(TOKENS).square().mean().item(), rel=1e-5)
    saved = load_file(tmp_path / "bert" / "model.safetensors")
    wanted = expected.bert.state_dict()
    assert saved.keys() == wanted.keys()
    for name, tensor in saved.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-5, atol=1e-6)
    head = torch.load(tmp_path / "head.pt", weights_only=True)
    for name, tensor in expected.head.state_dict().items():
        assert type(head[name]) is torch.Tensor
        torch.testing.assert_close(head[name], tensor, rtol=1e-5, atol=1e-6)
    assert (tmp_path / "note").read_text() == "done"


class Classifier(torch.nn.Module):
    """Model without `save_pretrained` of its own, with an encoder of transformers, or an adapted encoder of PEFT."""

    def __init__(self, is_adapted: bool) -> None:
        super().__init__()
        self.encoder: Any = Encoder().bert
        if is_adapted:
            peft = pytest.importorskip("peft", reason="PEFT is not installed")
            torch.manual_seed(1)
            config = peft.LoraConfig(r=2, target_modules=["query"], init_lora_weights=False)
            self.encoder = peft.get_peft_model(self.encoder, config)
        self.head = torch.nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(self.encoder(input_ids=tokens).last_hidden_state[:, 0])
        return outputs


def update(model: Any, optimizer: torch.optim.Optimizer, backward: Any) -> None:
    backward(model(TOKENS).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def save_submodule(folder: str, strategy: str, is_adapted: bool) -> None:
    accelerator = Accelerator(cpu=True, strategy=strategy)
    torch.manual_seed(0)
    model = Classifier(is_adapted)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    update(model, optimizer, accelerator.backward)
    model(TOKENS)  # the parameters may now be gathered
    model.encoder.save_pretrained(f"{folder}/saved")
    accelerator.wait_for_everyone()
    update(model, optimizer, accelerator.backward)
    if not is_adapted:
        accelerator.unwrap_model(model).encoder.save_pretrained(
            f"{folder}/again", state_dict=accelerator.get_state_dict(model.encoder)
        )
    accelerator.wait_for_everyone()


def save_submodule_on_rank_0(folder: str) -> str:
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    model = accelerator.prepare(Classifier(False))
    if accelerator.is_main_process:
        with pytest.raises(UnsupportedError) as error:
            model.encoder.save_pretrained(folder)
        return str(error.value)
    return ""


@pytest.mark.parametrize(("strategy", "is_adapted"), [("fsdp", False), ("fsdp", True), ("tp", False)])
def test_a_submodule_of_a_sharded_model_saves_whole_tensors(tmp_path: Path, strategy: str, is_adapted: bool) -> None:
    run_ranks(save_submodule, 2, str(tmp_path), strategy, is_adapted)
    torch.manual_seed(0)
    expected = Classifier(is_adapted)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for number, name in enumerate(["saved"] if is_adapted else ["saved", "again"]):
        update(expected, optimizer, torch.Tensor.backward)
        expected.encoder.save_pretrained(tmp_path / f"expected{number}")
        file = "adapter_model.safetensors" if is_adapted else "model.safetensors"
        saved, wanted = load_file(tmp_path / name / file), load_file(tmp_path / f"expected{number}" / file)
        assert saved.keys() == wanted.keys()
        for key, tensor in saved.items():
            torch.testing.assert_close(tensor, wanted[key], rtol=1e-5, atol=1e-6)
    if not is_adapted:
        assert BertModel.from_pretrained(tmp_path / "saved", add_pooling_layer=False).config.hidden_size == 8


def test_a_submodule_that_only_rank_0_saves_is_an_error(tmp_path: Path) -> None:
    message, _ = run_ranks(save_submodule_on_rank_0, 2, str(tmp_path))
    assert "on rank 0 only" in message
    assert not list(tmp_path.iterdir())
