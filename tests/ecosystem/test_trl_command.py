"""The command `trl` starts training through Accelerate's launcher: here through Headway's, with the same result."""

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
from tiny_language import gpt2, lines, tokenizer
from transformers import set_seed
set_seed(7)
words = tokenizer()
words.save_pretrained("model")
gpt2(words).save_pretrained("model")
import json
print(json.dumps(lines(24)))
"""
ARGUMENTS = """
    --model_name_or_path model --dataset_name data --dataset_train_split train --max_steps 3 --per_device_train_batch_size 4
    --report_to none --use_cpu --bf16 false --gradient_checkpointing false --save_strategy no --output_dir out --cpu
"""


def call(folder, *command, stands_in=True):
    """What a command prints."""
    environment = {
        **os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo",
        **(make_variables(os.environ) if stands_in else {}),
    }  # fmt: skip
    ended = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    return ended.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model and a data set as files."""
    made = tmp_path_factory.mktemp("trl")
    texts = json.loads(call(made, "-c", TINY, str(SCRIPTS)).splitlines()[-1])
    (made / "data").mkdir()
    (made / "data/train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return made


def trained(folder, *more, stands_in=True):
    """The weights that `trl sft` leaves."""
    call(folder, "-m", "trl.cli.main", "sft", *ARGUMENTS.split(), *more, stands_in=stands_in)
    weights = load_file(folder / "out/model.safetensors")
    (folder / "out/model.safetensors").unlink()
    return weights


def test_it_trains_to_the_same_weights(folder):
    theirs, ours = trained(folder, stands_in=False), trained(folder, "--num_processes", "1")
    assert theirs.keys() == ours.keys()
    assert all(theirs[name].equal(ours[name]) for name in theirs)


def test_its_own_config_for_shards_is_read(folder):
    before = load_file(folder / "model/model.safetensors")
    after = trained(folder, "--accelerate_config", "fsdp2", "--num_processes", "2", "--mixed_precision", "no")
    # The file asks for whole weights, so the trainer writes them.
    assert after.keys() == before.keys()
    moved = max((after[name] - before[name]).abs().max().item() for name in after)
    assert 0 < moved < 1e-3
