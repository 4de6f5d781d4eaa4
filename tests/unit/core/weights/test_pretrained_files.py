"""Test that other libraries open our files: transformers and PEFT those of save_state and push_to_hub, torch those of merge."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.distributed import checkpoint as dcp

from headway import Accelerator
from headway.cli.main import group
from headway.core.weights.pretrained_files import copy_files
from headway.errors import ConfigError
from tests.unit.core.weights.hub import TOKEN, serve_hub

PUSH = """
import sys, torch, transformers
from pathlib import Path
from headway import Accelerator
folder = Path(sys.argv[1])
accelerator = Accelerator(cpu=True)
config = transformers.LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
torch.manual_seed(0)
model = accelerator.prepare(transformers.LlamaForCausalLM(config))
model.generation_config.max_new_tokens = 7
from tokenizers import Tokenizer, models
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?")))
print(accelerator.push_to_hub(model, "pushed", tokenizer, private=True, commit_message="first"))
print(accelerator.push_to_hub(model, "somebody/pushed", tokenizer, revision="next", max_shard_size="4KB", commit_message="second"))
tokenizer.save_pretrained(folder / "home")
model.config._name_or_path = str(folder / "home")
accelerator.save_state(folder / "saved", weights="huggingface")
torch.save(model.state_dict(), folder / "expected.pt")
"""

OPEN = """
import sys, torch, transformers
expected = torch.load(sys.argv[1] + "/expected.pt")
for folder in sys.argv[2:]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.generation_config.max_new_tokens == 7
    state = model.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state)
    assert transformers.AutoTokenizer.from_pretrained(folder)("a")["input_ids"] == [0]
"""


def run_code(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    offline = {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TRANSFORMERS_VERBOSITY": "error"}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, **offline, **environment},
        text=True,
        capture_output=True,
        timeout=600,
    )


@pytest.mark.slow
def test_from_pretrained_opens_pushed_saved_and_merged_folders(tmp_path):
    pytest.importorskip("transformers")
    with serve_hub() as (url, store):
        done = run_code(PUSH, tmp_path, HF_ENDPOINT=url, HF_TOKEN=TOKEN)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == [f"{url}/somebody/pushed/commit/{'0' * 40}"] * 2
        assert store.messages == ["first", "second"]
        assert store.private["somebody/pushed"] in (True, "private")
        branches = store.repos["somebody/pushed"]
        assert "model.safetensors" in branches["main"]
        assert "model.safetensors.index.json" in branches["next"]
        for branch, files in branches.items():
            (tmp_path / branch).mkdir()
            for name, content in files.items():
                (tmp_path / branch / name).write_bytes(content)
    (tmp_path / "next" / "model.safetensors").unlink()  # a file of the branch from which it was created
    merged = CliRunner().invoke(group, ["merge", str(tmp_path / "saved"), str(tmp_path / "merged")])
    assert merged.exit_code == 0, merged.output
    bare = CliRunner().invoke(group, ["merge", str(tmp_path / "saved"), str(tmp_path / "dcp"), "--to", "dcp"])
    assert bare.exit_code == 0, bare.output
    back = CliRunner().invoke(group, ["merge", str(tmp_path / "dcp"), str(tmp_path / "back")])
    assert back.exit_code == 0, back.output
    folders = [tmp_path / name for name in ("main", "next", "saved", "merged", "back")]
    done = run_code(OPEN, tmp_path, *folders, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr


ADAPTERS = """
import sys, torch, transformers, peft
from pathlib import Path
from headway import Accelerator
folder = Path(sys.argv[1])
accelerator = Accelerator(cpu=True)
config = transformers.LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
torch.manual_seed(0)
base = transformers.LlamaForCausalLM(config)
base.save_pretrained(folder / "base")
model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
model = accelerator.prepare(model)
accelerator.save_state(folder / "saved", weights="huggingface")
again = peft.PeftModel.from_pretrained(transformers.LlamaForCausalLM.from_pretrained(folder / "base"), folder / "saved")
x = torch.arange(8)[None]
assert torch.equal(model.eval()(x).logits, again.eval()(x).logits)
assert not torch.equal(base.eval()(x).logits, transformers.LlamaForCausalLM.from_pretrained(folder / "base").eval()(x).logits)
"""


@pytest.mark.slow
def test_peft_opens_the_adapters(tmp_path):
    pytest.importorskip("peft")
    done = run_code(ADAPTERS, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "saved" / "adapter_model.safetensors").is_file()
    assert not (tmp_path / "saved" / "model.safetensors").exists()


REFUSED = """
import torch
from headway import Accelerator
from huggingface_hub.errors import HfHubHTTPError
accelerator = Accelerator(cpu=True)
try:
    accelerator.push_to_hub(accelerator.prepare(torch.nn.Linear(1, 1)), "pushed", token="hf_wrong")
except HfHubHTTPError as error:
    print(error.response.status_code)
"""


@pytest.mark.slow
def test_wrong_token_is_refused_and_nothing_is_uploaded():
    with serve_hub() as (url, store):
        done = run_code(REFUSED, HF_ENDPOINT=url)
        assert done.stdout == "401\n", done.stderr
        assert store.repos == {}


TRAINER = """
import sys, torch
from headway import Trainer, TrainingArguments
arguments = TrainingArguments(sys.argv[1], push_to_hub=True, hub_model_id="team/net", hub_token=sys.argv[2], use_cpu=True)
model = torch.nn.Linear(2, 1)
model.forward = lambda x, labels: {"loss": (torch.nn.functional.linear(x, model.weight) - labels).square().mean()}
trainer = Trainer(model, arguments)
trainer.save_model()
assert sys.argv[2] not in arguments.to_json_string()
"""


@pytest.mark.slow
def test_trainer_uploads_the_files_it_saves(tmp_path):
    with serve_hub() as (url, store):
        done = run_code(TRAINER, tmp_path, TOKEN, HF_ENDPOINT=url)
        assert done.returncode == 0, done.stderr
        assert store.messages == ["Model save"]
        files = store.repos["team/net"]["main"]
        assert {"model.safetensors", "training_args.json", "README.md"} <= files.keys()
        assert json.loads(files["training_args.json"])["hub_token"] == "<HUB_TOKEN>"


def test_unknown_format_of_weights_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"save_state\(weights='onnx'\); allowed: 'huggingface' or None"):
        Accelerator(cpu=True).save_state(tmp_path / "saved", weights="onnx")


def test_only_description_files_are_copied(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir(), there.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "manifest.json", "merges.txt"):
        (here / name).write_text(name)
    assert [path.name for path in copy_files(here, there)] == ["config.json", "merges.txt", "tokenizer.json"]
    assert copy_files(tmp_path / "none", there) == copy_files(None, there) == copy_files(here, here) == []


# ---------------------------------------------------------------- torch.distributed.checkpoint


def save_model(folder: Path) -> nn.Module:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2).bfloat16())
    model = accelerator.prepare(model)
    accelerator.save_state(folder)
    return model


def merge(*arguments: object) -> str:
    done = CliRunner().invoke(group, ["merge", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.output


def test_torch_loads_the_output_of_merge(tmp_path):
    model = save_model(tmp_path / "saved")
    assert ".metadata" in merge(tmp_path / "saved", tmp_path / "dcp", "--to", "dcp")
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "wrap",
    [lambda s: s, lambda s: {"model": s, "step": 3}, lambda s: {"app": {"model": s, "optim": {"a": torch.ones(2)}}}],
)
def test_merge_reads_checkpoints_of_torch(wrap, tmp_path):
    model = save_model(tmp_path / "saved")
    dcp.save(wrap(model.state_dict()), checkpoint_id=tmp_path / "dcp", no_dist=True)
    merge(tmp_path / "dcp", tmp_path / "merged")
    from safetensors.torch import load_file

    found = load_file(tmp_path / "merged" / "model.safetensors")
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


class Harm:
    """Object whose unpickling would run a command."""

    def __reduce__(self):
        return os.system, ("touch harmed",)


def test_metadata_that_would_run_a_command_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "saved")
    merge(tmp_path / "saved", tmp_path / "dcp", "--to", "dcp")
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Harm()))
    done = CliRunner().invoke(group, ["merge", str(tmp_path / "dcp"), str(tmp_path / "merged")])
    assert done.exit_code != 0
    assert "which no metadata file needs" in str(done.exception or done.output)
    assert not (tmp_path / "harmed").exists()


def test_parts_without_a_model_are_named(tmp_path):
    dcp.save({"ema": {"a": torch.ones(2)}, "optim": {"b": torch.ones(2)}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    done = CliRunner().invoke(group, ["merge", str(tmp_path / "dcp"), str(tmp_path / "merged")])
    assert "none of the parts ema, optim is a model" in str(done.exception or done.output)
