"""Shortened tracebacks: the user's lines stay, forwarding frames go, and Headway's own errors keep all frames."""

import subprocess
import sys
import traceback

import pytest
import torch

from headway import Accelerator
from headway.common.tracebacks import format_short_traceback, remove_engine_noise
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


def caught(call, *args):
    try:
        call(*args)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_an_error_that_headway_raises_ends_in_the_users_line():
    accelerator = Accelerator(cpu=True)
    error = caught(lambda: accelerator.prepare())
    assert isinstance(error, PrepareError)
    text, num_hidden = format_short_traceback(error)
    assert num_hidden == 2
    assert "accelerator.prepare()" in text
    assert "src/headway/" not in text
    lines = text.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-2].startswith("headway.errors.PrepareError: prepare() got nothing")
    assert lines[-1] == "(2 frames of Headway and torch left out; HEADWAY_LOG_LEVEL=debug shows all)"


def test_the_constructor_that_dataclasses_write_is_left_out():
    text, _ = format_short_traceback(caught(lambda: Accelerator(gradient_accumulation_steps="four")))
    assert "<string>" not in text
    assert 'steps="four"' in text


def test_an_error_in_the_users_model_shows_both_of_the_users_lines():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Narrow())
    text, num_hidden = format_short_traceback(caught(lambda: model(torch.ones(2, 4))))
    assert num_hidden > 0
    assert "model(torch.ones(2, 4))" in text
    assert "in forward\n    return self.layer(inputs[:, :3])" in text
    assert "F.linear(input" in text  # torch's own line, where it failed
    assert "_call_impl" not in text
    assert "headway/core/training" not in text
    assert "mat1 and mat2 shapes cannot be multiplied" in text


def test_an_error_in_the_users_dataset():
    class Broken(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return {}[index]

    loader = Accelerator(cpu=True).prepare(torch.utils.data.DataLoader(Broken()))
    text, _ = format_short_traceback(caught(lambda: list(loader)))
    assert "return {}[index]" in text
    assert "dataloader.py" not in text


def test_a_mistake_inside_headway_is_shown_whole():
    error = caught(check_file_value, None, 1, "")  # not on purpose: an AttributeError of its own
    assert isinstance(error, AttributeError)
    assert format_short_traceback(error) == ("".join(traceback.format_exception(error)), 0)


def test_a_users_own_error_is_as_python_prints_it():
    def fails():
        try:
            raise KeyError("k")
        except KeyError:
            raise ValueError("v")

    error = caught(fails)
    assert format_short_traceback(error) == ("".join(traceback.format_exception(error)), 0)


def test_causes_are_shortened_too(tmp_path):
    from headway.core.config.files import read_config

    error = caught(read_config, tmp_path / "none.yaml")
    text, num_hidden = format_short_traceback(error)
    assert num_hidden >= 2
    assert "headway/core/config" not in text
    assert "FileNotFoundError: [Errno 2]" in text
    assert "headway.errors.ConfigError: the config file" in text


def test_an_error_that_is_its_own_context_ends():
    error = ValueError("round")
    error.__cause__ = error
    assert "ValueError: round" in format_short_traceback(error)[0]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups came with Python 3.11")
def test_groups():
    error = ExceptionGroup("several", [caught(lambda: Accelerator(cpu=True).prepare()), ValueError("own")])  # noqa: F821
    text, num_hidden = format_short_traceback(error)
    assert num_hidden == 2
    assert "src/headway/" not in text
    assert "ValueError: own" in text


def test_an_engines_text_without_its_noise():
    assert remove_engine_noise(GLOO) == "Connection closed by peer [127.0.0.1]:13741."
    stack = "timed out\nException raised from f at /__w/x.cpp:1 (most recent call first):\nframe #0: a\n<omitting python frames>\n"
    assert remove_engine_noise(f"{stack}frame #9: b\nand more") == "timed out\nand more"
    assert remove_engine_noise("[1, 2] is a list; see [a.cc:1]") == "[1, 2] is a list; see [a.cc:1]"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "level", "is_short"),
    [("", "", True), ("", "debug", False), ("import sys; sys.excepthook = lambda *a: print('own')", "", None)],
)
def test_a_plain_process(tmp_path, monkeypatch, before, level, is_short):
    (tmp_path / "train.py").write_text(f"{before}\nfrom headway import Accelerator\nAccelerator(cpu=True).prepare()\n")
    monkeypatch.setenv("HEADWAY_LOG_LEVEL", level)
    ran = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 1
    if is_short is None:
        assert (ran.stdout, ran.stderr) == ("own\n", "")
        return
    assert "headway.errors.PrepareError" in ran.stderr
    assert "line 3, in <module>" in ran.stderr
    assert ("training/prepared/prepare.py" in ran.stderr) is not is_short


# ---------------------------------------------------------------- sys.excepthook


@pytest.fixture
def said(monkeypatch):
    """List of the exceptions that the program's own hook receives. It is installed before Headway's."""
    heard = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: heard.append(error))
    return heard


def raised(error):
    sys.excepthook(type(error), error, error.__traceback__)


def test_the_hook_is_removed_with_the_runtime():
    before = sys.excepthook
    for _ in range(2):
        Accelerator(cpu=True)
        standing = sys.excepthook
        Accelerator(cpu=True)
        assert sys.excepthook is standing is not before
        process.reset()
        assert sys.excepthook is before


def test_a_hook_of_before_prints_in_our_place_and_notes_follow(said, capsys):
    own = sys.excepthook
    Accelerator(cpu=True)
    error = MemoryError("no more")
    raised(error)
    assert said == [error]
    assert capsys.readouterr().err.count("headway: memory") == 1
    process.reset()
    assert sys.excepthook is own


def test_a_hook_installed_later_stays_and_can_call_ours(said, capsys):
    Accelerator(cpu=True)
    ours, theirs = sys.excepthook, []

    def later(kind, error, trace):
        theirs.append(error)
        ours(kind, error, trace)

    sys.excepthook = later
    process.reset()
    assert sys.excepthook is later
    raised(MemoryError("no more"))
    assert len(theirs) == len(said) == 1
    assert "headway" not in capsys.readouterr().err  # the runtime is over

    Accelerator(cpu=True)
    raised(MemoryError("once more"))
    assert len(theirs) == len(said) == 2
    assert capsys.readouterr().err.count("headway: memory") == 1
    process.reset()
    assert sys.excepthook is later


def test_a_hook_that_restores_ours_restores_the_previous_one(said):
    Accelerator(cpu=True)
    ours = sys.excepthook
    sys.excepthook = print
    process.reset()
    sys.excepthook = ours
    raised(ValueError("v"))
    assert len(said) == 1
