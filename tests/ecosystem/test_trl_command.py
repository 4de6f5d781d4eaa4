"""Tests that the command `trl`, which uses Accelerate's launcher, gives the same result with Headway's launcher."""

import json
import os
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from headway.launch.stand_in import make_variables
from tests.ecosystem.both import SCRIPTS

pytestmark = pytest.mark.slow

TINY = """
import sys
sys.path.insert(0, sys.argv[1])
from tiny_language import gpt2, lines, train_tokenizer
from transformers import set_seed
set_seed(7)
words = train_tokenizer()
words.save_pretrained("model")
gpt2(words).save_pretrained("model")
import json
print(json.dumps(lines(24)))
"""
ARGUMENTS = """
    --model_name_or_path model --dataset_name data --dataset_train_split train --max_steps 3 --per_device_train_batch_size 4
    --report_to none --use_cpu --bf16 false --gradient_checkpointing false --save_strategy no --output_dir out --cpu
"""


def call(folder, *command, uses_headway=True):
    """Run a Python command in the folder and return its output."""
    environment = {
        **os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo",
        **(make_variables(os.environ) if uses_headway else {}),
    }  # fmt: skip
    result = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a small model and a data set."""
    path = tmp_path_factory.mktemp("trl")
    texts = json.loads(call(path, "-c", TINY, str(SCRIPTS)).splitlines()[-1])
    (path / "data").mkdir()
    (path / "data/train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def train(folder, *more, uses_headway=True):
    """Run `trl sft` and return the weights that it saves."""
    call(folder, "-m", "trl.cli.main", "sft", *ARGUMENTS.split(), *more, uses_headway=uses_headway)
    weights = load_file(folder / "out/model.safetensors")
    (folder / "out/model.safetensors").unlink()
    return weights


def test_weights_match_those_of_accelerate(folder):
    theirs, ours = train(folder, uses_headway=False), train(folder, "--num_processes", "1")
    assert theirs.keys() == ours.keys()
    assert all(theirs[name].equal(ours[name]) for name in theirs)


def test_fsdp_config_of_trl_is_applied(folder):
    before = load_file(folder / "model/model.safetensors")
    after = train(folder, "--accelerate_config", "fsdp2", "--num_processes", "2", "--mixed_precision", "no")
    # The file asks for whole weights, so the trainer writes them.
    assert after.keys() == before.keys()
    moved = max((after[name] - before[name]).abs().max().item() for name in after)
    assert 0 < moved < 1e-3
