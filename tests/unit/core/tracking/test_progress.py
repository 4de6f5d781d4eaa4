"""Test progress output: plain lines if the output is not a terminal, a bar on a terminal, and nothing on other ranks."""

import io
import time
from contextlib import nullcontext

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, track
from headway.common import scope
from headway.core.runtime import process
from headway.core.tracking import progress
from headway.errors import ConfigError


def test_plain_lines_show_values_and_rates():
    out = io.StringIO()
    bar = track(range(3), description="epoch 0", interval=0.0, file=out)
    seen = []
    for item in bar:
        seen.append(item)
        bar.show(loss=0.123456)
        bar.add(tokens=10)
    lines = out.getvalue().splitlines()
    assert seen == [0, 1, 2]
    assert len(bar) == 3
    assert len(lines) == 3
    assert lines[0].startswith("epoch 0: 1/3 | loss 0.1235 | ")
    assert "tokens/s" in lines[0]
    assert lines[-1].startswith("epoch 0: 3/3")


def test_long_interval_gives_one_line_at_the_end():
    out = io.StringIO()
    assert list(track(iter("abc"), interval=1000, file=out)) == ["a", "b", "c"]
    assert len(out.getvalue().splitlines()) == 1
    with pytest.raises(TypeError, match="no length"):
        len(track(iter("abc")))
    assert len(track(iter("abc"), total=3)) == 3


class Terminal(io.StringIO):
    """Output that claims to be a terminal."""

    def isatty(self):
        return True


def test_terminal_shows_a_bar():
    out = Terminal()
    bar = track(range(5), description="here", file=out)
    for _ in bar:
        bar.show(loss=1.5)
    assert "here" in out.getvalue()
    assert "5/5 | loss 1.5" in out.getvalue()


@pytest.mark.parametrize("description", ["[train]", "epoch [1/3]", "[/]"])
def test_terminal_shows_brackets_in_a_description(description):
    out = Terminal()
    for _ in track(range(2), description=description, file=out):
        pass
    assert description in out.getvalue()


@pytest.mark.parametrize("name", ["FORCE_COLOR", "JPY_PARENT_PID"])
def test_log_files_and_notebooks_get_plain_lines(monkeypatch, name):
    """Logs of CI and commands after `!` in a notebook only look like a terminal."""
    monkeypatch.setenv(name, "1")
    out = Terminal() if name == "JPY_PARENT_PID" else io.StringIO()
    for _ in track(range(3), description="outer", file=out):
        for _ in track(range(2), description="inner", file=out):
            pass
    assert "\x1b" not in out.getvalue()
    assert "\r" not in out.getvalue()
    assert [line.split(":")[0] for line in out.getvalue().splitlines()] == ["inner"] * 3 + ["outer"]


def test_resumed_loader_continues_its_count():
    def loader():
        source = DataLoader(TensorDataset(torch.arange(32.0)), batch_size=2)
        return Accelerator(cpu=True).prepare_data_loader(source)

    first, out = loader(), io.StringIO()
    for number, _ in enumerate(track(first, file=io.StringIO()), 1):
        if number == 4:
            break
    state = first.state_dict()
    second = loader()
    second.load_state_dict(state)
    bar = track(second, file=out, interval=0.0)
    assert len(list(bar)) == 12
    lines = out.getvalue().splitlines()
    assert (lines[0].split(" | ")[0], lines[-1].split(" | ")[0]) == ("5/16", "16/16")
    assert " left" in lines[0]
    assert lines[-1].split(" | ")[-1].startswith("in ")
    # The next epoch and the one after a break start at 0.
    for passes in (first, second):
        again = io.StringIO()
        assert len(list(track(passes, file=again))) == 16
        assert again.getvalue().startswith("16/16")


def test_initial_steps_do_not_count_for_the_rate():
    out = io.StringIO()
    bar = track(range(8, 10), total=10, initial=8, file=out)
    list(bar)
    assert out.getvalue().startswith("10/10 | ")
    bar._start, bar._num_done, bar._is_over = time.monotonic() - 100.0, 9, False
    assert "| 0.0/s |" in bar.facts()
    assert bar.facts().endswith("1:40 left")


def test_loop_that_ended_early_shows_no_remaining_time():
    out = io.StringIO()
    for _ in track(range(3), file=out):
        break
    assert out.getvalue().split(" | ")[-1].startswith("in ")


def test_errors_and_breaks_leave_the_loop(capsys):
    out = io.StringIO()
    bar = iter(track(range(3), file=out))
    next(bar)
    with pytest.raises(KeyError):
        bar.throw(KeyError())
    for _ in track(range(3), file=out):
        break


@pytest.mark.parametrize(("rank", "local_rank", "main_only", "is_heard"),
                         [(0, 0, True, True), (2, 0, True, False), (2, 0, False, True), (1, 1, False, False)])  # fmt: skip
def test_ranks_that_show_progress(monkeypatch, rank, local_rank, main_only, is_heard):
    here = process.ProcessRuntime(rank, 4, local_rank, 2, process.CPU, torch.device("cpu"), owns_group=False)
    monkeypatch.setattr(scope.get_or_create(process._Process), "runtime", here)
    out = io.StringIO()
    assert list(track(range(2), main_process_only=main_only, file=out)) == [0, 1]
    assert bool(out.getvalue()) is is_heard


def test_least_important_parts_are_left_out_of_a_narrow_line():
    bar = track(range(4), description="training", file=io.StringIO())
    bar.show(loss=0.5, learning_rate=0.001, grad_norm=2.0)
    for _ in bar:
        pass
    parts = bar._make_parts()
    bar._make_parts = lambda: parts  # fixed, because rates change with time
    whole = bar.facts()
    assert [bar.facts(len(whole)), bar.facts(10_000)] == [whole, whole]
    assert whole.startswith("4/4 | loss 0.5 | learning_rate 0.001 | grad_norm 2 | ")
    shorter = bar.facts(len(whole) - 1)
    assert "grad_norm" not in shorter
    assert "learning_rate" in shorter
    assert bar.facts(5).startswith("4/4 | loss 0.5 | in ")
    lengths = [len(bar.facts(width)) for width in range(30, len(whole) + 1)]
    assert all(length <= width for length, width in zip(lengths, range(30, len(whole) + 1)))


def test_tensors_are_read_when_they_are_drawn():
    out = io.StringIO()
    bar = track(range(2), file=out)
    for number in bar:
        loss = torch.tensor(number + 0.25, requires_grad=True)
        bar.show(loss=loss, seen=torch.tensor([number]))
        assert not bar._values["loss"].requires_grad  # the autograd graph is not kept alive
    assert " | loss 1.25 | seen 1 | " in out.getvalue()
    with pytest.raises(
        ConfigError, match=r"show\(loss=...\) got a tensor of shape \(2,\); give one number, such as loss.mean"
    ):
        bar.show(loss=torch.ones(2))


class Never:
    """Stand-in for a Readback whose device waits for a failed rank, so that its value never arrives."""

    is_ready = False

    def __init__(self, tensor):
        pass


@pytest.mark.parametrize("raises", [True, False])
def test_interrupted_loop_does_not_wait_for_a_device_that_never_answers(monkeypatch, raises):
    monkeypatch.setattr(progress, "Readback", Never)
    monkeypatch.setattr(progress, "_INTERRUPTED_TIMEOUT", 0.05)
    out = io.StringIO()

    def loop():
        bar = track(range(4), file=out)
        for _ in bar:
            bar.show(loss=torch.zeros((), device="meta"))
            if raises:
                raise ValueError("of the loop")
            break

    with pytest.raises(ValueError, match="of the loop") if raises else nullcontext():
        loop()
    assert out.getvalue().startswith("0/4")
