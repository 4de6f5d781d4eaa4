"""Test shortened tracebacks: the user's lines stay, forwarding frames go, and Headway's own errors keep all frames."""

import subprocess
import sys
import traceback

import pytest
import torch

from headway import Accelerator
from headway.common.tracebacks import format_short_traceback, remove_backend_noise
from headway.core.config.values import check_file_value
from headway.core.runtime import process
from headway.errors import PrepareError

GLOO = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:13741. This is "
    "typically caused by a remote worker crashing. Check the logs of the remote worker before reporting an error. GLHF! 🏖️"
)


class Narrow(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, inputs):
        return self.layer(inputs[:, :3])


def catch_error(call, *args):
    """Call the function and return the exception that it raises."""
    try:
        call(*args)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_error_raised_by_headway_ends_in_the_users_line():
    accelerator = Accelerator(cpu=True)
    error = catch_error(lambda: accelerator.prepare())
    assert isinstance(error, PrepareError)
    text, num_hidden = format_short_traceback(error)
    assert num_hidden == 2
    assert "accelerator.prepare()" in text
    assert "src/headway/" not in text
    lines = text.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-2].startswith("headway.errors.PrepareError: prepare() got nothing")
    assert lines[-1] == "(2 frames of Headway and torch left out; HEADWAY_LOG_LEVEL=debug shows all)"


def test_generated_constructor_of_a_dataclass_is_left_out():
    text, _ = format_short_traceback(catch_error(lambda: Accelerator(gradient_accumulation_steps="four")))
    assert "<string>" not in text
    assert 'steps="four"' in text


def test_error_in_the_users_model_shows_both_of_the_users_lines():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Narrow())
    text, num_hidden = format_short_traceback(catch_error(lambda: model(torch.ones(2, 4))))
    assert num_hidden > 0
    assert "model(torch.ones(2, 4))" in text
    assert "in forward\n    return self.layer(inputs[:, :3])" in text
    assert "F.linear(input" in text  # the line of torch that failed
    assert "_call_impl" not in text
    assert "headway/core/training" not in text
    assert "mat1 and mat2 shapes cannot be multiplied" in text


def test_error_in_the_users_dataset_shows_its_line():
    class Broken(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return {}[index]

    loader = Accelerator(cpu=True).prepare(torch.utils.data.DataLoader(Broken()))
    text, _ = format_short_traceback(catch_error(lambda: list(loader)))
    assert "return {}[index]" in text
    assert "dataloader.py" not in text


def test_unexpected_error_inside_headway_keeps_all_frames():
    error = catch_error(check_file_value, None, 1, "")  # raises an unintended AttributeError
    assert isinstance(error, AttributeError)
    assert format_short_traceback(error) == ("".join(traceback.format_exception(error)), 0)


def test_error_without_headway_frames_is_printed_like_in_python():
    def raise_error():
        try:
            raise KeyError("k")
        except KeyError:
            raise ValueError("v")

    error = catch_error(raise_error)
    assert format_short_traceback(error) == ("".join(traceback.format_exception(error)), 0)


def test_causes_are_shortened_too(tmp_path):
    from headway.core.config.files import read_config

    error = catch_error(read_config, tmp_path / "none.yaml")
    text, num_hidden = format_short_traceback(error)
    assert num_hidden >= 2
    assert "headway/core/config" not in text
    assert "FileNotFoundError: [Errno 2]" in text
    assert "headway.errors.ConfigError: the config file" in text


def test_error_that_is_its_own_cause_is_formatted():
    error = ValueError("round")
    error.__cause__ = error
    assert "ValueError: round" in format_short_traceback(error)[0]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups came with Python 3.11")
def test_exception_groups_are_shortened():
    error = ExceptionGroup("several", [catch_error(lambda: Accelerator(cpu=True).prepare()), ValueError("own")])  # noqa: F821
    text, num_hidden = format_short_traceback(error)
    assert num_hidden == 2
    assert "src/headway/" not in text
    assert "ValueError: own" in text


def test_noise_is_removed_from_engine_errors():
    assert remove_backend_noise(GLOO) == "Connection closed by peer [127.0.0.1]:13741."
    stack = "timed out\nException raised from f at /__w/x.cpp:1 (most recent call first):\nframe #0: a\n<omitting python frames>\n"
    assert remove_backend_noise(f"{stack}frame #9: b\nand more") == "timed out\nand more"
    assert remove_backend_noise("[1, 2] is a list; see [a.cc:1]") == "[1, 2] is a list; see [a.cc:1]"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "level", "is_short"),
    [("", "", True), ("", "debug", False), ("import sys; sys.excepthook = lambda *a: print('own')", "", None)],
)
def test_traceback_in_a_plain_process_is_short_only_by_default(tmp_path, monkeypatch, before, level, is_short):
    (tmp_path / "train.py").write_text(f"{before}\nfrom headway import Accelerator\nAccelerator(cpu=True).prepare()\n")
    monkeypatch.setenv("HEADWAY_LOG_LEVEL", level)
    result = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    if is_short is None:
        assert (result.stdout, result.stderr) == ("own\n", "")
        return
    assert "headway.errors.PrepareError" in result.stderr
    assert "line 3, in <module>" in result.stderr
    assert ("training/prepared/prepare.py" in result.stderr) is not is_short


# ---------------------------------------------------------------- sys.excepthook


@pytest.fixture
def heard(monkeypatch):
    """Install a program's own `sys.excepthook` before Headway's, and return the list of exceptions that it receives."""
    said = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: said.append(error))
    return said


def call_excepthook(error):
    sys.excepthook(type(error), error, error.__traceback__)


def test_hook_is_removed_with_the_runtime():
    before = sys.excepthook
    for _ in range(2):
        Accelerator(cpu=True)
        standing = sys.excepthook
        Accelerator(cpu=True)
        assert sys.excepthook is standing is not before
        process.reset()
        assert sys.excepthook is before


def test_earlier_hook_prints_the_error_and_headway_adds_notes(heard, capsys):
    own = sys.excepthook
    Accelerator(cpu=True)
    error = MemoryError("no more")
    call_excepthook(error)
    assert heard == [error]
    assert capsys.readouterr().err.count("headway: memory") == 1
    process.reset()
    assert sys.excepthook is own


def test_later_hook_stays_and_can_call_headways(heard, capsys):
    Accelerator(cpu=True)
    ours, theirs = sys.excepthook, []

    def call_both_hooks(kind, error, trace):
        theirs.append(error)
        ours(kind, error, trace)

    sys.excepthook = call_both_hooks
    process.reset()
    assert sys.excepthook is call_both_hooks
    call_excepthook(MemoryError("no more"))
    assert len(theirs) == len(heard) == 1
    assert "headway" not in capsys.readouterr().err  # the runtime has been reset

    Accelerator(cpu=True)
    call_excepthook(MemoryError("once more"))
    assert len(theirs) == len(heard) == 2
    assert capsys.readouterr().err.count("headway: memory") == 1
    process.reset()
    assert sys.excepthook is call_both_hooks


def test_restoring_headways_hook_after_its_end_restores_the_earlier_one(heard):
    Accelerator(cpu=True)
    ours = sys.excepthook
    sys.excepthook = print
    process.reset()
    sys.excepthook = ours
    call_excepthook(ValueError("v"))
    assert len(heard) == 1
