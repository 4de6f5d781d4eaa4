"""Progress: plain lines where the output is no terminal, a bar on one, silence on other ranks."""

import io

import pytest
import torch

from headway import track
from headway.runtime import process


def test_plain_lines():
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


def test_one_line_at_the_end_where_the_interval_is_long():
    out = io.StringIO()
    assert list(track(iter("abc"), interval=1000, file=out)) == ["a", "b", "c"]
    assert len(out.getvalue().splitlines()) == 1
    with pytest.raises(TypeError, match="no length"):
        len(track(iter("abc")))
    assert len(track(iter("abc"), total=3)) == 3


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_on_a_terminal():
    out = Terminal()
    bar = track(range(5), description="here", file=out)
    for _ in bar:
        bar.show(loss=1.5)
    assert "here" in out.getvalue()
    assert "5/5 | loss 1.5" in out.getvalue()


def test_an_error_passes_and_a_break_ends(capsys):
    out = io.StringIO()
    bar = iter(track(range(3), file=out))
    next(bar)
    with pytest.raises(KeyError):
        bar.throw(KeyError())
    for _ in track(range(3), file=out):
        break


@pytest.mark.parametrize(("rank", "local_rank", "main_only", "is_heard"),
                         [(0, 0, True, True), (2, 0, True, False), (2, 0, False, True), (1, 1, False, False)])  # fmt: skip
def test_which_ranks_show(monkeypatch, rank, local_rank, main_only, is_heard):
    here = process.ProcessRuntime(rank, 4, local_rank, 2, process.CPU, torch.device("cpu"), owns_group=False)
    monkeypatch.setattr(process, "_current", here)
    out = io.StringIO()
    assert list(track(range(2), main_process_only=main_only, file=out)) == [0, 1]
    assert bool(out.getvalue()) is is_heard


def test_what_matters_least_is_left_out_where_there_is_no_room():
    bar = track(range(4), description="training", file=io.StringIO())
    bar.show(loss=0.5, learning_rate=0.001, grad_norm=2.0)
    for _ in bar:
        pass
    parts = bar._parts()
    bar._parts = lambda: parts  # rates change while we look
    whole = bar.facts()
    assert [bar.facts(len(whole)), bar.facts(10_000)] == [whole, whole]
    assert whole.startswith("4/4 | loss 0.5 | learning_rate 0.001 | grad_norm 2 | ")
    shorter = bar.facts(len(whole) - 1)
    assert "grad_norm" not in shorter
    assert "learning_rate" in shorter
    assert bar.facts(5).startswith("4/4 | loss 0.5 | in ")
    lengths = [len(bar.facts(width)) for width in range(30, len(whole) + 1)]
    assert all(length <= width for length, width in zip(lengths, range(30, len(whole) + 1)))
