"""Checkpoints in memory: a kill costs at most one update, a flipped byte falls back to another state, and no memory is leaked."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headway import ProjectConfiguration
from headway.errors import ConfigError
from headway.launch.agent.shared_memory import SharedMemory
from tests.sweep import memory

pytestmark = pytest.mark.timeout(900)
"""Starting a launch takes seconds, and up to two minutes on a machine that is busy with forty others."""


@pytest.fixture(scope="module")
def run_undisturbed(tmp_path_factory) -> dict:
    """Return a function that runs a layout without kills or states in memory, once per layout."""
    made: dict = {}

    def run(layout: str) -> list:
        if layout not in made:
            made[layout] = memory.launch(tmp_path_factory.mktemp(layout) / "whole", layout, "0", 0, 0)
        return made[layout]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", pytest.param("fsdp", marks=pytest.mark.matrix)])
def test_killed_worker_loses_at_most_one_update(layout, run_undisturbed, tmp_path):
    outcome = memory.compare(memory.launch(tmp_path / "cut", layout, "1", 2, 1), run_undisturbed(layout))
    assert outcome.problems == []
    assert len(outcome.lost) == 2
    assert max(outcome.lost) <= 1
    assert all(outcome.from_memory)
    kept = Path((tmp_path / "cut" / "folder").read_text())
    assert kept.name.startswith("headway-memory-")
    assert not kept.exists()  # the memory is freed


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["newest", pytest.param("all", marks=pytest.mark.matrix)])
def test_flipped_byte_falls_back_to_another_state(damage, run_undisturbed, tmp_path):
    outputs = memory.launch(tmp_path / "cut", "ddp", "2", 2, 1, damage)
    outcome = memory.compare(outputs, run_undisturbed("ddp"))
    assert outcome.problems == []
    if damage == "all":  # to the disk, or to the start if nothing has been saved
        assert not any(outcome.from_memory)
    else:  # to the previous state
        assert all(outcome.from_memory)
        assert max(outcome.lost) <= 2
    assert "is damaged" in (tmp_path / "cut" / "stderr").read_text()


def test_memory_folder_belongs_to_its_agent_while_it_lives(tmp_path):
    held = SharedMemory(tmp_path)
    left = tmp_path / "headway-memory-left"  # a folder of a killed agent
    left.mkdir()
    (left / "file").touch()
    other = SharedMemory(tmp_path)
    assert not left.exists()
    assert Path(held.folder).is_dir()
    assert os.stat(held.folder).st_mode & 0o077 == 0
    handle = os.open(held.folder, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(handle)
    held.remove()
    other.remove()
    assert list(tmp_path.iterdir()) == []
    assert SharedMemory(tmp_path / "absent").folder == ""


def test_invalid_settings_are_errors():
    with pytest.raises(ConfigError, match="keep_in_memory=-1"):
        ProjectConfiguration("run", automatic_checkpoint_naming=True, keep_in_memory=-1)
    with pytest.raises(ConfigError, match="automatic_checkpoint_naming"):
        ProjectConfiguration("run", keep_in_memory=1)


TRAINER = """
import os, signal, sys
import torch
from headway import Trainer, TrainerCallback, TrainingArguments

keeps, attempt = int(sys.argv[1]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.dropout = torch.nn.Linear(4, 1), torch.nn.Dropout(0.2)

    def forward(self, x, labels):
        return {"loss": torch.nn.functional.mse_loss(self.dropout(self.layer(x)), labels)}


class Killer(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        if os.environ["RANK"] == "0":
            print("begun", state.global_step, flush=True)

    def on_step_end(self, args, state, control, **kwargs):
        if keeps and (attempt, state.global_step) in ((0, 5), (1, 9)) and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)


torch.manual_seed(0)
rows = [{"x": x, "labels": x.sum(0, keepdim=True)} for x in torch.randn(48, 4)]
args = TrainingArguments(
    "run", use_cpu=True, per_device_train_batch_size=2, num_train_epochs=1, save_steps=100, disable_tqdm=True, learning_rate=0.01,
    accelerator_config={"project_config": {"keep_in_memory": keeps, "overlap_saves": True}},
)
trainer = Trainer(model=Model(), args=args, train_dataset=rows, callbacks=[Killer()])
trainer.train(resume_from_checkpoint=True)
if os.environ["RANK"] == "0":
    print("end", trainer.state.global_step, *(each.tolist() for each in trainer.model.state_dict().values()), flush=True)
"""


@pytest.mark.matrix
def test_trainer_keeps_states_in_memory(tmp_path):
    outputs = []
    for keeps in ("1", "0"):
        folder = tmp_path / keeps
        folder.mkdir()
        (folder / "train.py").write_text(TRAINER)
        words = ["-m", "headway", "launch", "--cpu", "-n", "2", "--max_restarts", "2", "train.py", keeps]
        result = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=600)
        assert result.returncode == 0, result.stderr
        outputs.append([line for line in result.stdout.splitlines() if line.startswith(("begun", "end"))])
    kept, whole = outputs
    assert whole[0] == "begun 0"
    assert [int(line.split()[1]) for line in kept[:-1]] in ([0, 5, 9], [0, 4, 9], [0, 5, 8], [0, 4, 8])
    assert kept[-1] == whole[-1]
    assert whole[-1].startswith("end 12 ")
