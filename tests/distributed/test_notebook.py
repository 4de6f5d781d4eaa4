"""Functions launched on real processes: results by rank, live output, the first exception, and closures."""

import pytest

from headway import debug_launcher, notebook_launcher
from headway.errors import ConfigError, LaunchError


def test_closure_runs_on_two_ranks_and_returns_results(capsys: pytest.CaptureFixture[str]) -> None:
    factor = 10  # a closure cannot be pickled by name

    def train(offset: int) -> float:
        import torch

        from headway import Accelerator

        accelerator = Accelerator()
        accelerator.print("hello from", accelerator.num_processes)
        own = torch.tensor([float(accelerator.process_index * factor + offset)])
        return accelerator.gather(own).sum().item()

    assert debug_launcher(train, (1,)) == [12.0, 12.0]
    assert "hello from 2" in capsys.readouterr().out


def test_exception_of_the_failed_rank_is_the_cause(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        from headway.common import env

        if env.get_rank() == 1:
            raise ZeroDivisionError("on purpose")

    with pytest.raises(LaunchError, match="on 2 processes ended with exit code 1") as raised:
        debug_launcher(fail)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert "rank 1 of 2 failed first" in capsys.readouterr().out


def test_result_that_cannot_be_pickled_is_none() -> None:
    def make() -> object:
        import multiprocessing

        return multiprocessing.Queue()  # RuntimeError when it is pickled

    assert notebook_launcher(make, num_processes=1, cpu=True) == [None]


def test_one_process_runs_without_agent_and_gets_the_precision() -> None:
    def precision() -> str:
        from headway import Accelerator

        return Accelerator().mixed_precision

    assert notebook_launcher(precision, num_processes=1, mixed_precision="bf16", cpu=True) == ["bf16"]


def test_zero_processes_is_an_error() -> None:
    with pytest.raises(ConfigError, match="num_processes=0"):
        debug_launcher(print, (), 0)


def test_hang_is_reported_after_the_timeout(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang() -> None:
        import time

        import torch

        from headway import Accelerator

        accelerator = Accelerator()
        if accelerator.process_index == 1:
            time.sleep(300)
        accelerator.gather(torch.ones(1))

    monkeypatch.setenv("HEADWAY_TIMEOUT", "5")
    with pytest.raises(LaunchError):
        debug_launcher(hang)
    assert "this run hangs: rank 1 of 2 is missing from gather" in capsys.readouterr().out
