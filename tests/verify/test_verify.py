"""Tests of the command `headway verify` on whole scripts. `run_collection.py` runs the whole collection."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headway.verify.verdict import Proof
from tests.docs.pages import parse_blocks
from tests.verify.grading import grade
from tests.verify.scripts.causes import PLANTED
from tests.verify.scripts.table import read_script

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"


def verify(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder and return its result."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
    return subprocess.run(
        [sys.executable, "-m", "headway", "verify", "--cpu", *args],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def read_proofs(result: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """Return the proofs in the JSON output."""
    return json.loads(result.stdout)["proofs"]  # type: ignore[no-any-return]


def read_statuses(result: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Return the status of each proof in the JSON output."""
    return {each["proof"]: each["status"] for each in read_proofs(result)}


@pytest.mark.slow
def test_correct_script_passes_and_leaves_no_files(tmp_path: Path) -> None:
    result = verify(tmp_path, "--json", "--skip", "data,memory", str(SCRIPTS / "correct" / "plain_loop.py"))
    statuses = read_statuses(result)
    assert result.returncode == 0, result.stdout
    assert statuses.pop("out_of_memory") == statuses.pop("layout") == "NOT CHECKED"
    assert set(statuses.values()) == {"PASS"}, result.stdout
    assert not list(tmp_path.iterdir())


def read_words(text: str) -> list[str]:
    """Return the lines of an output with single spaces, and with "#" for each number."""
    text_without_breaks = re.sub(r"\n {20,}", " ", text)  # join the lines of a long result
    lines = [re.sub(r"\d[\d.e+-]*", "#", " ".join(line.split())) for line in text_without_breaks.splitlines()]
    return [line for line in lines if line and "passed, " not in line and not line.startswith("$")]


@pytest.mark.slow
def test_page_shows_the_output_of_its_script(tmp_path: Path) -> None:
    """The words of both outputs in docs/verify.md match real runs. Numbers may differ."""
    code_blocks = [block for block in parse_blocks(ROOT / "docs" / "verify.md") if block.kind in ("python", "text")]
    script = next(block.text for block in code_blocks if block.file == "train.py")
    table, failure = (block.text for block in code_blocks if block.kind == "text")
    (tmp_path / "train.py").write_text(script)
    result = verify(tmp_path, "train.py")
    shown, printed = (read_words(text) for text in (table, result.stdout))
    # The time that updates wait for data depends on the machine's load.
    assert [line for line in printed if "data keeps up" not in line][: len(shown) - 1] == shown[:-1], result.stdout
    (tmp_path / "train.py").write_text(script.replace("targets)", "targets, reduction='sum')"))
    result = verify(tmp_path, "--only", "processes", "train.py")
    assert read_words(result.stdout)[1:] == read_words(failure), result.stdout


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("import torch", "the script ended without creating an Accelerator"),
        ("import headway\nheadway.Accelerator()", "the script ended without an update"),
        ("import headway\nheadway.Accelerator()\nraise ValueError('broken')", "ValueError: broken"),
    ],
)
@pytest.mark.slow
def test_script_without_an_update_is_refused(tmp_path: Path, body: str, message: str) -> None:
    (tmp_path / "train.py").write_text(body)
    result = verify(tmp_path, "--only", "learning", "train.py")
    assert result.returncode == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--only", "resumes", "train.py"), "'resumes' is not a proof; did you mean"),
        (("-n", "1", "train.py"), "verify compares one process with several"),
        (("missing.py",), "there is no script"),
    ],
)
def test_wrong_flags_are_refused(tmp_path: Path, args: tuple[str, ...], message: str) -> None:
    (tmp_path / "train.py").write_text("")
    result = verify(tmp_path, *args)
    assert result.returncode == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("loss_times_processes", "processes"),
        ("order_drawn_by_each_rank", "samples"),
        ("step_counter_not_saved", "resume"),
        ("no_seed", "repeat"),
        ("queue_filled_by_loss_function", "out_of_memory"),
        ("head_missing_in_optimizer", "learning"),
        ("softmax_over_the_batch", "leaks"),
        ("losses_kept_with_graphs", "memory"),
        ("evaluation_keeps_graphs", "memory"),
        ("local_negatives", "processes"),
        ("plateau_by_local_loss", "processes"),
        ("stream_in_two_workers", "samples"),
        ("own_generator_not_saved", "resume"),
        ("constant_buffer_changed", "learning"),
        ("future_in_the_normalization", "leaks"),
        ("batch_norm_compiled", "processes"),
        ("clipped_per_micro_batch", "processes"),
        ("teacher_updated_by_main", "processes"),
        ("logging_draws_on_rank_zero", "processes"),
        ("augmentation_unseeded_in_workers", "repeat"),
        ("tie_becomes_copy_on_resume", "resume"),
        ("frozen_late_still_decays", "learning"),
        ("stays_in_eval_mode", "learning"),
        ("zero_grad_each_micro_batch", "learning"),
    ],
)
@pytest.mark.matrix
def test_planted_fault_is_found_with_its_cause(tmp_path: Path, name: str, word: str) -> None:
    path = SCRIPTS / "faulty" / f"{name}.py"
    flags = shlex.split(read_script(path).flags)
    result = verify(tmp_path, "--json", "--only", word, *flags, str(path))
    assert read_statuses(result) == {word: "FAIL"}
    assert result.returncode == 1
    verdicts = [
        Proof(word, title="").report_failure(each["reason"], details=each["details"]) for each in read_proofs(result)
    ]
    assert "cause right" in grade(path, verdicts), result.stdout
    assert "line wrong" not in grade(path, verdicts), result.stdout


def test_every_faulty_script_has_a_planted_cause() -> None:
    scripts = {path.stem: path.read_text() for path in (SCRIPTS / "faulty").glob("*.py")}
    assert set(PLANTED) == set(scripts)
    missing = [(name, code) for name, planted in PLANTED.items() for code in planted.code if code not in scripts[name]]
    assert not missing


@pytest.mark.parametrize("name", ["dropout_seeded", "gan", "stream_with_state", "teacher_on_all_ranks"])
@pytest.mark.matrix
def test_correct_script_raises_no_alarm(tmp_path: Path, name: str) -> None:
    result = verify(tmp_path, "--json", "--skip", "data", str(SCRIPTS / "correct" / f"{name}.py"))
    assert "FAIL" not in read_statuses(result).values(), result.stdout
