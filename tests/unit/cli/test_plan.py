"""Test `headway plan`: its output for real configs and functions, and one clear error for each wrong use."""

import contextlib
import json
import os
import sys

import pytest

from headway.cli import main
from tests.unit.planning.models import llama_config


@pytest.fixture
def run(capsys):
    """Return a function that runs `headway plan` and returns stdout, or stderr if an exit code is expected."""

    def run_command(*args, code=0):
        with pytest.raises(SystemExit) as exc_info:
            main.main(["plan", *map(str, args)])
        said = capsys.readouterr()
        assert exc_info.value.code == code, said
        return said.out if code == 0 else said.err

    return run_command


@pytest.fixture
def folder(tmp_path):
    """Save the config of a small Llama model, and return its folder."""
    llama_config(architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_layouts_are_compared_in_a_table(run, folder):
    output = run(folder, "--ranks", 16, "--budget", "80GB")
    table, _, legend = output.partition("\nmemory of the fullest rank: total is the sum of ")
    rows = [line.split()[0] for line in table.splitlines()[4:] if line]
    assert "peak is the most that tensors take at once" in legend
    assert "waits for is" in legend
    assert sorted(rows) == ["ddp", "fsdp", "fsdp+tp=8:", "hsdp=8"]  # four heads do not divide among 8
    assert "LlamaForCausalLM" in output
    assert "1 x 64 tokens" in output


@pytest.mark.slow
def test_one_layout_is_shown_in_full(run, folder):
    output = run(folder / "config.json", "--ranks", 4, "--strategy", "fsdp+tp=2", "--sequence", 32, "--batch_size", 2)
    for word in ("2 shard x 2 tp", "all_gather", "reduce_scatter", "all_reduce", "2 x 32 tokens", "at least"):
        assert word in output


def read_to_end(descriptor):
    """Return everything that was written to a pipe or terminal whose writing side is closed."""
    shown = b""
    with contextlib.suppress(OSError):  # a terminal has EIO at its end instead of an empty read
        while piece := os.read(descriptor, 4096):
            shown += piece
    return shown


@pytest.mark.slow
@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_is_shown_on_stderr(run, monkeypatch, is_terminal):
    reading, writing = os.openpty() if is_terminal else os.pipe()
    with os.fdopen(writing, "w") as stderr, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        run("tests.unit.planning.models:chain", "--ranks", 4, "--strategy", "ddp", "--strategy", "fsdp")
    shown = read_to_end(reading).decode()
    os.close(reading)
    begin, end, last = ("\r\x1b[K", "", "\r\x1b[K") if is_terminal else ("", "\n", "")
    assert shown == f"{begin}planning ddp{end}{begin}planning fsdp{end}{last}"  # a terminal shows one line that changes


def test_json_output_has_a_reason_for_each_layout_that_fails(run, folder):
    output = json.loads(run(folder, "--ranks", 8, "--strategy", "fsdp", "--strategy", "hsdp=3", "--json"))
    good, bad = output["layouts"]
    assert (good["strategy"], good["fits"], good["axes"]) == ("fsdp", True, {"shard": 8})
    assert bad["fits"] is False
    assert "hsdp=3" in bad["reason"]
    assert sum(row["num_bytes"] for row in good["exchanges"]) > 0


@pytest.mark.slow
def test_model_type_is_accepted(run):
    assert "BertForMaskedLM" in run("bert", "--ranks", 4, "--strategy", "fsdp", "--sequence", 8)


@pytest.mark.slow
def test_image_model_is_planned_with_images(run):
    assert "1 image(s) of 224 x 224" in run("vit", "--ranks", 4, "--strategy", "fsdp")


def test_function_with_a_step_is_planned(run):
    output = run(
        "tests.unit.planning.models:chain_and_step", "--ranks", 4, "--strategy", "fsdp", "--precision", "no"
    )  # --precision is the earlier name of --mixed_precision
    assert "Chain: 1,728 parameters" in output
    assert "reduce_scatter" in output


def test_function_without_a_step_is_planned(run):
    assert "not counted" in run("tests.unit.planning.models:chain", "--ranks", 4, "--strategy", "fsdp")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["lama", "--ranks", 4], "did you mean llama"),
        (["no_such_module:f", "--ranks", 4], "cannot be imported"),
        (["tests.unit.planning.models:chian", "--ranks", 4], "did you mean chain"),
        (["tests.unit.planning.models:LENGTH", "--ranks", 4], "no function 'LENGTH'"),
        (["tests.unit.planning.models:llama_config", "--ranks", 4], "must return a torch.nn.Module"),
        (["/", "--ranks", 4], "no config.json"),
        (["gpt2", "--ranks", 4, "--sequence", 5000], "has 1024 positions"),
        (["gpt2", "--ranks", 4, "--strategy", "fdsp"], "'fdsp' is unknown"),
        (["gpt2", "--ranks", 4, "--strategy", "hsdp=3"], "takes 3 ranks"),
        (["gpt2", "--ranks", 0], "--ranks"),
        (["gpt2"], "--ranks"),
        (["gpt2", "--ranks", 4, "--memory", "80 cows"], "is not a size"),
        (["gpt2", "--ranks", 4, "--optimizer", "adamv"], "did you mean adam"),
        (["gpt2", "--ranks", 4, "--intra", 0], "--intra"),
    ],
)
def test_wrong_use_prints_one_error(run, args, said):
    error = run(*args, code=2)
    assert said in error
    assert "Traceback" not in error
