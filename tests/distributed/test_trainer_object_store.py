"""A Trainer whose `output_dir` is in a bucket writes everything to the bucket, and resumes from there after preemption."""

import io
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from headway import Accelerator, Trainer, TrainingArguments
from headway.cli.checkpoints import merge
from headway.common import scope
from headway.common.object_path import to_path
from headway.errors import CheckpointError, ConfigError
from tests.distributed.test_trainer_preempted import SCRIPT, run_script
from tests.stores import server
from tests.unit.trainer.models import bert, classes

URL = f"s3://{server.BUCKET}/run"
IN_A_BUCKET = SCRIPT.replace('TrainingArguments("out"', f'TrainingArguments("{URL}"')


class Words:
    """Tokenizer stand-in that saves itself with `open`, as tokenizers do."""

    def save_pretrained(self, folder):
        with open(f"{folder}/words.txt", "w") as file:
            file.write("one two")


@pytest.fixture
def port(monkeypatch):
    with server.running() as found:
        for name, value in server.environment(found).items():
            monkeypatch.setenv(name, value)
        scope.clear()
        yield found
        scope.clear()


@pytest.mark.parametrize("num_processes", [1, pytest.param(2, marks=pytest.mark.matrix)])
def test_same_command_resumes_from_the_bucket(num_processes, port, tmp_path):
    code, curve, end, err = run_script(tmp_path / "whole", num_processes)
    assert code == 0, err
    code, first, _, err = run_script(tmp_path / "here", num_processes, strike=7, script=IN_A_BUCKET)
    assert code == 75, err
    assert "run/preempted.json" in server.keys(port)
    code, last, resumed, err = run_script(tmp_path / "here", num_processes, script=IN_A_BUCKET)
    assert code == 0, err
    assert f"the run in {URL} was preempted" in err
    assert first | last == curve
    assert min(last) == max(first) + 1
    assert resumed == end
    assert "run/preempted.json" not in server.keys(port)
    assert sorted(path.name for path in (tmp_path / "here").iterdir() if not path.name.startswith(".")) == ["train.py"]


def test_all_files_of_a_trainer_are_in_the_bucket(port, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = TrainingArguments(URL, num_train_epochs=3, eval_strategy="epoch", save_strategy="epoch", save_total_limit=2,
                             load_best_model_at_end=True, use_cpu=True, disable_tqdm=True, logging_steps=1)  # fmt: skip
    rows = classes(24)
    trainer = Trainer(bert(), args, train_dataset=rows, eval_dataset=rows, processing_class=Words())
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    trainer.save_metrics("eval", trainer.evaluate())
    trainer.create_model_card(license="mit")
    there = {name.removeprefix("run/") for name in server.keys(port, "run/")}
    assert {"log.jsonl", "model.safetensors", "words.txt", "config.json", "training_args.json", "trainer_state.json", "README.md",
            "eval_results.json", "all_results.json"} <= there  # fmt: skip
    assert {name.split("/")[1] for name in there if name.startswith("checkpoints/")} >= {"checkpoint_2", "latest"}
    assert json.loads((to_path(URL) / "trainer_state.json").read_text())["global_step"] == trainer.state.global_step
    assert list(tmp_path.iterdir()) == []

    with pytest.raises(CheckpointError, match=r"is a run's folder, not a checkpoint; .* holds checkpoint_2"):
        trainer.train(resume_from_checkpoint=URL)
    with pytest.raises(CheckpointError, match="does not exist"):
        trainer.train(resume_from_checkpoint=f"{URL}/nowhere")
    again = Trainer(bert(), args, train_dataset=rows, eval_dataset=rows)
    again.train(resume_from_checkpoint=f"{URL}/checkpoints/checkpoint_2")
    for one, other in zip(trainer.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_weights_and_objects_are_written_to_the_bucket_and_replaced(port, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(64, 64))
    accelerator.save_model(model, URL, max_shard_size=64 * 64 * 4)
    assert server.keys(port) == [f"run/model-0000{n}-of-00002.safetensors" for n in (1, 2)] + [
        "run/model.safetensors.index.json"
    ]
    accelerator.save_model(model, URL)
    assert server.keys(port) == ["run/model.safetensors"]
    accelerator.save(model.state_dict(), f"{URL}/state.pt")
    found = torch.load(io.BytesIO((to_path(URL) / "state.pt").read_bytes()))
    assert torch.equal(found["weight"], model.weight)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="lost a slash"):
        accelerator.save_model(model, Path(URL))
    accelerator.save_state(tmp_path / "saved")
    result = CliRunner().invoke(merge, [str(tmp_path / "saved"), f"{URL}/merged"])
    assert isinstance(result.exception, ConfigError)
    assert "is a URL; give a folder for the weights" in str(result.exception)
    accelerator.end_training()
