"""Test files that a save adds to a checkpoint in an object store. They are found again, in parts or not."""

import pytest
import torch
from click.testing import CliRunner

from headway import Accelerator, ProjectConfiguration
from headway.cli.checkpoints import merge as command


def test_merge_copies_the_files_that_from_pretrained_needs(bucket, tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, num_key_value_heads=2, **sizes))
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(made)
    accelerator.save_state("s3://bucket/here", weights="huggingface")
    expected = {name: each.clone() for name, each in model.state_dict().items()}
    accelerator.end_training()

    result = CliRunner().invoke(command, ["s3://bucket/here", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "config.json" in result.output
    assert (tmp_path / "out" / "config.json").stat().st_size > 500
    found = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_compiled_code_is_loaded_from_a_store(bucket, monkeypatch):
    """Bytes stand in for torch's artifacts. `test_compiled.py` uses real ones, in a folder."""
    monkeypatch.setenv("HEADWAY_SECRET", "a secret of sixteen characters or more")
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"code" * 700, None))
    taken: list[bytes] = []
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", lambda data: taken.append(data) or object())
    project = ProjectConfiguration("s3://bucket/run", automatic_checkpoint_naming=True, keep_compiled=True)

    def start_training() -> Accelerator:
        accelerator = Accelerator(cpu=True, project_config=project)
        accelerator.prepare(torch.nn.Linear(2, 1))
        return accelerator

    first = start_training()
    first.save_state()
    first.end_training()
    second = start_training()
    second.resume("latest")
    second.end_training()
    assert taken == [b"code" * 700]
