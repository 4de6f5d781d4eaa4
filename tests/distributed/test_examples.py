"""Every example runs on one process and on two, and differs from its base only in the lines that it marks."""

import difflib
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.ranks import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
BASE = EXAMPLES / "by_feature" / "base.py"
FEATURES = sorted(path for path in BASE.parent.glob("*.py") if path != BASE)
MARK = re.compile(r"# feature\b")


def list_code_lines(text: str) -> list[str]:
    """Return the stripped lines, without the module docstring. A marked `with` line may indent other lines."""
    without_docstring = re.sub(r'\A""".*?"""\n', "", text, flags=re.DOTALL)
    return [line.strip() for line in without_docstring.splitlines()]


def find_unmarked_differences(base: str, text: str) -> list[str]:
    """Return unmarked added lines, and lines of the base that are deleted without a marked replacement."""
    old, new = list_code_lines(base), list_code_lines(text)
    found = []
    for kind, i, j, k, m in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind != "equal":
            found += [f"+ {line}" for line in new[k:m] if line and not MARK.search(line)]
        if kind == "delete":
            found += [f"- {line}" for line in old[i:j] if line]
    return found


@pytest.mark.parametrize("path", FEATURES, ids=lambda path: path.stem)
def test_example_differs_from_the_base_only_in_marked_lines(path):
    text = path.read_text()
    assert MARK.search(text), "no line is marked"
    assert find_unmarked_differences(BASE.read_text(), text) == []


def test_comparison_finds_unmarked_differences():
    base = '"""Base."""\na = 1\nb = 2\n'
    assert find_unmarked_differences(base, '"""Other."""\na = 1\nb = 3  # feature\n') == []
    assert find_unmarked_differences(base, '"""Other."""\nwith c:  # feature\n    a = 1\n    b = 2\n') == []
    assert find_unmarked_differences(base, "a = 1\nb = 3\n") == ["+ b = 3"]
    assert find_unmarked_differences(base, "a = 1\n") == ["- b = 2"]


def test_readme_table_names_every_example():
    table = (EXAMPLES / "README.md").read_text()
    for path in [
        EXAMPLES / "demo.py",
        EXAMPLES / "text.py",
        EXAMPLES / "mixture.py",
        EXAMPLES / "chat.py",
        EXAMPLES / "dpo.py",
        EXAMPLES / "pretrain.py",
        EXAMPLES / "recipe" / "recipe.py",
        EXAMPLES / "vision.py",
        EXAMPLES / "fsdp.py",
        EXAMPLES / "gan.py",
        EXAMPLES / "trainer.py",
        EXAMPLES / "forecast.py",
        BASE,
        *FEATURES,
    ]:
        assert f"{path.relative_to(EXAMPLES)}" in table


def run_examples(*paths: str) -> dict[str, float]:
    return {Path(path).stem: runpy.run_path(path)["main"]() for path in paths}


def test_all_feature_examples_learn_on_one_process():
    (found,) = run_ranks(run_examples, 1, *map(str, [BASE, *FEATURES]))
    assert min(found.values()) > 0.85, found


def test_all_feature_examples_learn_on_two_processes():
    """All examples run in the same two processes, because new processes for each would take minutes."""
    first, second = run_ranks(run_examples, 2, *map(str, [BASE, *FEATURES]), timeout=300)
    assert first == second
    assert min(first.values()) > 0.85, first


def launch(*args: str, cwd: Path) -> str:
    command = [sys.executable, "-m", "headway", "launch", "--cpu", "-n", "2", *args]
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "drift apart" not in result.stderr  # forecasts also step an optimizer that is not prepared
    return result.stdout


def test_vision_example_learns_digits(tmp_path):
    out = launch(str(EXAMPLES / "vision.py"), "--epochs", "4", cwd=tmp_path)
    num_right, num_images = map(int, re.findall(r"(\d+) of (\d+) right", out)[-1])
    assert num_images == 397
    assert num_right / num_images > 0.95


def test_text_example_trains_saves_and_loads(tmp_path):
    """The run is short. Beating the bigram model would take the default number of updates."""
    flags = ["--steps", "20", "--batch-size", "4", "--max-bytes", "400000"]
    out = launch(str(EXAMPLES / "text.py"), *flags, cwd=tmp_path)
    assert (tmp_path / "runs" / "text" / "model.safetensors").exists()
    assert "with the same evaluation" in out
    bits, bigram = map(float, re.search(r"GPT ([\d.]+), byte bigram ([\d.]+)", out).groups())
    assert 2 < bigram < 5
    assert bits < 6


def read_source_losses(folder: Path) -> dict[int, dict[str, float]]:
    """Return the losses by source of each update in a run's log."""
    found: dict[int, dict[str, float]] = {}
    for line in map(json.loads, (folder / "mixture" / "log.jsonl").read_text().splitlines()):
        losses = {name: value for name, value in line.get("values", {}).items() if name.startswith("loss/")}
        if losses:
            found[line["step"]] = losses
    return found


@pytest.mark.slow
def test_mixture_example_continues_on_two_processes_after_a_kill(tmp_path):
    """The run is killed on one process and continued on two. Its losses equal those of the undisturbed run."""
    sizes = ["--updates", "12", "--files", "3", "--save-every", "2", "--kill-at", "5", "--out", str(tmp_path)]
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / "mixture.py"), *sizes], capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "killed at update 5 on 1 process, continued on 2" in result.stdout
    expected, found = (read_source_losses(tmp_path / name) for name in ("undisturbed", "stopped"))
    assert found.keys() == expected.keys()
    assert len(expected) >= 4
    for step, values in expected.items():
        assert found[step] == pytest.approx(values, rel=1e-5)
    assert {name for values in expected.values() for name in values} == {"loss/python", "loss/c++", "loss/prose"}


@pytest.mark.slow
def test_chat_example_answers_and_stops(tmp_path):
    out = launch(str(EXAMPLES / "chat.py"), cwd=tmp_path)
    assert re.search(r"\[train\]It is \w+\.<\|im_end\|>\[/train\]", out)
    num_right, num_questions = map(int, re.search(r"(\d+) of (\d+) responses are right and end", out).groups())
    assert num_questions == 12
    assert num_right > 9


@pytest.mark.slow
def test_dpo_example_prefers_the_chosen_responses(tmp_path):
    """tests/distributed/test_dpo.py compares the example with plain PyTorch."""
    out = launch(str(EXAMPLES / "dpo.py"), "--updates", "20", cwd=tmp_path)
    assert re.search(r"chosen:.*\[train\]The capital of (.+) is .*rejected:.*\[train\]", out, re.DOTALL)
    accuracy, margin = re.search(r"50 other pairs: .*rewards/accuracies (.*), rewards/margins (.*)", out).groups()
    assert float(accuracy) == 1
    assert float(margin) > 2


@pytest.mark.slow
def test_pretraining_example_tokenizes_learns_and_continues(tmp_path):
    options = ("--out", str(tmp_path / "run"), "--files", "20")
    out = launch(str(EXAMPLES / "pretrain.py"), *options, "--updates", "40", cwd=tmp_path)
    num_tokens = re.search(r"stdlib\.idx: ([\d,]+) tokens in 20 documents, uint16", out)[1]
    assert f"{num_tokens} tokens, " in out
    losses = [float(loss) for loss in re.findall(r"update \d+: loss (.*)", out)]
    assert len(losses) == 2
    assert losses[1] < losses[0] < 7  # log(1024) = 6.93
    out = launch(str(EXAMPLES / "pretrain.py"), *options, "--updates", "60", cwd=tmp_path)
    assert re.findall(r"update (\d+): loss", out) == ["60"]
    assert "20 documents" not in out


@pytest.mark.slow
def test_demo_ends_with_the_same_loss_despite_failures(tmp_path):
    """`make demo` has a real allocation failure, a SIGKILL and a restart. The loss stays the same up to rounding."""
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / "demo.py")], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "memory ran out on rank 1 with micro-batches of 16 rows" in result.stdout
    assert "rank 0 was ended by SIGKILL" in result.stdout
    assert "resumed after 20 updates" in result.stdout
    assert "The kill cost 4 updates." in result.stdout
    undisturbed, troubled = map(float, re.findall(r"loss after 40 updates: (.*)", result.stdout))
    assert undisturbed == pytest.approx(troubled, rel=1e-5)
    assert 1 < undisturbed < 3.5
    page = Path(re.search(r"file://(\S+)", result.stdout)[1])
    assert "undisturbed" in page.read_text()


def test_forecast_example_trains_with_the_forecast_batch_size(tmp_path):
    out = launch(str(EXAMPLES / "forecast.py"), cwd=tmp_path)
    largest = int(re.search(r"largest batch: (\d+)", out)[1])
    assert 100 < largest < 1000
    size, loss = re.search(r"trained with batches of (\d+): last loss ([\d.]+)", out).groups()
    assert int(size) == largest
    assert float(loss) < 1.5


def test_nothing_is_lost_example_ends_with_the_same_loss(tmp_path):
    losses = {}
    for is_troubled in (False, True):
        flags = ["--trouble"] if is_troubled else []
        result = subprocess.run(
            [sys.executable, "-m", "headway", "launch", "--cpu", "-n", "2", "--max_restarts", "1",
             str(EXAMPLES / "nothing_is_lost.py"), *flags],
            cwd=tmp_path, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        output = result.stdout + result.stderr
        assert result.returncode == 0, output
        assert ("memory ran out on rank 1" in output) == is_troubled, output
        assert ("rank 0 was ended by SIGKILL" in output) == is_troubled, output
        assert ("after 10 updates, epoch 3" in output) == is_troubled, output
        losses[is_troubled] = re.findall(r"loss after 18 updates: ([0-9.]+)", output)
    assert len(losses[False]) == 1
    assert losses[True] == losses[False]


@pytest.mark.slow
def test_trainer_example_learns_digits_and_text(tmp_path):
    """Run both tasks, including a BERT from a config, at a small size on two ranks."""
    out = launch(str(EXAMPLES / "trainer.py"), "--epochs", "4", "--snippets", "12", cwd=tmp_path)
    digits, seen = re.search(r"digits: ([\d.]+) of (\d+) held out right", out).groups()
    assert float(digits) > 0.85
    assert seen == "397"
    text, largest = map(float, re.search(r"text: ([\d.]+) of .* alone gives ([\d.]+)", out).groups())
    assert text > largest + 0.05
    assert (tmp_path / "runs" / "trainer" / "text" / "weights" / "config.json").exists()


def test_fsdp_example_learns_on_one_and_two_processes():
    for num_ranks in (1, 2):
        for found in run_ranks(run_examples, num_ranks, str(EXAMPLES / "fsdp.py")):
            assert found["fsdp"] < 0.5


def test_gan_example_learns_average_digits():
    """The result is the distance per pixel from the average digit. It is 0.3 for an untrained generator."""
    first, second = run_ranks(run_examples, 2, str(EXAMPLES / "gan.py"))
    assert first == second
    assert first["gan"] < 0.08


def run_context_parallel_example() -> float:
    return runpy.run_path(str(EXAMPLES / "context_parallel.py"))["main"](["--rows", "12", "--length", "30"])


def test_context_parallel_example_matches_one_process():
    (whole,) = run_ranks(run_context_parallel_example, 1)
    for cut in run_ranks(run_context_parallel_example, 2):
        assert cut == pytest.approx(whole, abs=1e-4)
