"""What scripts' test suites import from `accelerate.test_utils`: conditions, launches, a tiny regression."""

import io
import shutil
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from headway.common import env
from headway.common.optional import available as installed
from headway.compat.accelerate.data.batches import gather
from headway.compat.accelerate.launching import available
from headway.compat.accelerate.launching.environment import parse_flag_from_env
from headway.compat.accelerate.state import AcceleratorState, PartialState
from headway.errors import HeadwayError, LaunchError
from headway.launch.stand_in import FOLDER
from headway.runtime.device import detect

Test = Any


def get_backend() -> tuple[str, int, Callable[..., int]]:
    """The kind of accelerator, how many there are, and what tells its allocated bytes; ("cpu", 1, ...) without one."""
    kind = detect().kind
    if kind == "cpu":
        return kind, 1, lambda *_: 0
    return kind, torch.accelerator.device_count(), torch.accelerator.memory_allocated


torch_device, device_count, memory_allocated_func = get_backend()


def get_launch_command(**kwargs: Any) -> list[str]:
    """`headway launch` with flags; True stands for a flag alone, False and None for none.

    Args:
        kwargs: `num_processes=2`, say.
    """
    command = [sys.executable, "-m", "headway", "launch", "--as", "accelerate"]
    flags = {name: value for name, value in kwargs.items() if value is not None and value is not False}
    return command + [f"--{name}" if value is True else f"--{name}={value}" for name, value in flags.items()]


DEFAULT_LAUNCH_COMMAND = get_launch_command(num_processes=device_count)


# -------------------------------------------------------------------- conditions


def skip(test_case: Test) -> Test:
    """Skip the test."""
    return unittest.skip("the test is to be left out")(test_case)


def slow(test_case: Test) -> Test:
    """Run the test only where the variable RUN_SLOW says so."""
    return unittest.skipUnless(parse_flag_from_env("RUN_SLOW", False), "RUN_SLOW is not set")(test_case)


def _needs(condition: bool, what: str) -> Callable[[Test], Test]:
    return unittest.skipUnless(condition, f"the test needs {what}")


def run_first(test_case: Test) -> Test:
    """Mark the test for pytest-order, to run before others."""
    import pytest

    return pytest.mark.order(1)(test_case)


def require_torch_min_version(test_case: Test = None, version: str | None = None) -> Test:
    """Run the test only with this version of torch or a later one."""
    if test_case is None:
        return lambda each: require_torch_min_version(each, version)
    return _needs(available.is_torch_version(">=", version or "0"), f"torch {version} or later")(test_case)


def _several(kind: str | None) -> bool:
    return device_count > 1 and (torch_device == kind if kind else torch_device != "cpu")


def _conditions() -> dict[str, tuple[bool, str]]:
    """The `require_*` decorators: when a test runs, and what it needs."""
    kinds = ("cuda", "xpu", "mps", "npu", "mlu", "sdaa", "musa", "neuron")
    found = {kind: (torch_device == kind, kind.upper()) for kind in ("cpu", *kinds)}
    found |= {f"non_{kind}": (torch_device != kind, f"another device than {kind}") for kind in ("cpu", "xpu", "hpu")}
    found |= {
        "cuda_or_hpu": (torch_device in ("cuda", "hpu"), "CUDA or HPU"),
        "cuda_or_xpu": (torch_device in ("cuda", "xpu"), "CUDA or XPU"),
        "fp16": (available.is_fp16_available(), "a device with float16"),
        "fp8": (available.is_fp8_available(), "float8"),
        "tpu": (False, "a TPU"),
        "non_torch_xla": (True, "no XLA"),
        "single_device": (device_count == 1 and torch_device != "cpu", "one accelerator"),
        "single_gpu": (torch_device == "cuda" and device_count == 1, "one GPU"),
        "single_xpu": (torch_device == "xpu" and device_count == 1, "one XPU"),
        "multi_device": (_several(None), "several accelerators"),
        "multi_gpu": (_several("cuda"), "several GPUs"),
        "multi_xpu": (_several("xpu"), "several XPUs"),
        "multi_gpu_or_xpu": (_several("cuda") or _several("xpu"), "several GPUs or XPUs"),
        "fsdp2": (True, "FSDP2"),
        "tp": (installed("transformers"), "transformers"),
        "huggingface_suite": (installed("transformers") and installed("datasets"), "transformers and datasets"),
        "trackers": (available.is_tensorboard_available() and installed("wandb"), "the trackers"),
    }
    packages = (
        "peft datasets transformers timm torchvision triton schedulefree bnb deepspeed tensorboard wandb trackio comet_ml aim "
        "clearml dvclive swanlab pandas mlflow pippy import_timer transformer_engine transformer_engine_mxfp8 torchao matplotlib "
        "torchdata_stateful_dataloader"
    )
    for name in packages.split():
        found[name] = (bool(getattr(available, f"is_{name}_available")()), name)
    return found


def __getattr__(name: str) -> Any:
    condition = _conditions().get(name.removeprefix("require_")) if name.startswith("require_") else None
    if condition is None:
        raise AttributeError(f"accelerate.test_utils has no {name!r} where Headway stands in for Accelerate")
    decorate = _needs(*condition)
    decorate.__doc__ = f"Run a test only where there is {condition[1]}."
    return decorate


# -------------------------------------------------------------------- cases


class TempDirTestCase(unittest.TestCase):
    """Tests with a folder `tmpdir`, emptied before each unless `clear_on_setup` is False."""

    clear_on_setup = True
    tmpdir: Path

    @classmethod
    def setUpClass(cls) -> None:
        """Create the folder."""
        cls.tmpdir = Path(tempfile.mkdtemp())

    @classmethod
    def tearDownClass(cls) -> None:
        """Remove it."""
        shutil.rmtree(cls.tmpdir, ignore_errors=True)

    def setUp(self) -> None:
        """Empty it."""
        if self.clear_on_setup:
            for path in self.tmpdir.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()


class AccelerateTestCase(unittest.TestCase):
    """Tests that reset the Accelerator and end the runtime after each."""

    def tearDown(self) -> None:
        """Reset."""
        AcceleratorState._reset_state()
        PartialState._reset_state()


class MockingTestCase(unittest.TestCase):
    """Tests that start mocks, which end with each test."""

    def add_mocks(self, mocks: Any) -> None:
        """Start them.

        Args:
            mocks: one or several.
        """
        for each in mocks if isinstance(mocks, list | tuple) else [mocks]:
            each.start()
            self.addCleanup(each.stop)


def are_the_same_tensors(tensor: torch.Tensor) -> bool:
    """Does every process have the same tensor?"""
    state = PartialState()
    shared = gather(tensor[None].clone().to(state.device)).cpu()
    return all(torch.equal(each, tensor.cpu()) for each in shared)


# -------------------------------------------------------------------- processes


class SubprocessCallException(HeadwayError):
    """A command failed; the message has what it printed."""


@dataclass
class RunOutput:
    """What a command printed, by lines."""

    returncode: int
    stdout: list[str]
    stderr: list[str]


def execute_subprocess_async(
    cmd: Sequence[str], env: Any = None, stdin: Any = None, timeout: float = 180, quiet: bool = False, echo: bool = True
) -> RunOutput:
    """Run a command and wait.

    Args:
        cmd: program and arguments.
        env: its environment; None: this one.
        stdin: its input.
        timeout: in seconds.
        quiet: do not print what it printed.
        echo: print the command.

    Raises:
        LaunchError: it failed; a RuntimeError; the message ends with its standard error.
    """
    line = [str(each) for each in cmd]
    if echo:
        print("Running:", *line)
    ran = subprocess.run(line, env=env, stdin=stdin, capture_output=True, text=True, timeout=timeout)
    if not quiet:
        sys.stdout.write(ran.stdout)
        sys.stderr.write(ran.stderr)
    if ran.returncode:
        raise LaunchError(f"{' '.join(line)!r} ended with {ran.returncode}; it said:\n{ran.stderr or ran.stdout}")
    return RunOutput(ran.returncode, ran.stdout.splitlines(), ran.stderr.splitlines())


def run_command(command: Sequence[str], return_stdout: bool = False, env: Any = None) -> str | None:
    """Run a command; returns what it printed where asked.

    Raises:
        SubprocessCallException: it failed.
    """
    ran = subprocess.run(
        [str(each) for each in command], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if ran.returncode:
        raise SubprocessCallException(
            f"{' '.join(map(str, command))!r} ended with {ran.returncode}; it said:\n{ran.stdout}"
        )
    return ran.stdout if return_stdout else None


def pytest_xdist_worker_id() -> int:
    """This worker's number under pytest-xdist, else 0."""
    return int((env.get("PYTEST_XDIST_WORKER") or "gw0").removeprefix("gw"))


def get_torch_dist_unique_port() -> int:
    """A port for process groups, another for each worker of pytest-xdist."""
    return 29500 + pytest_xdist_worker_id()


def path_in_accelerate_package(*components: str) -> Path:
    """A path below the package `accelerate` that stands for Headway."""
    return FOLDER.joinpath("accelerate", *components)


@contextmanager
def assert_exception(exception_class: type[BaseException], msg: str | None = None) -> Iterator[None]:
    """The block must raise this exception, with `msg` in its message.

    Raises:
        AssertionError: it does not.
    """
    try:
        yield
    except exception_class as error:
        if msg is not None and msg not in str(error):
            raise AssertionError(f"{msg!r} is not in {str(error)!r}") from error
    else:
        raise AssertionError(f"{exception_class.__name__} was expected, and nothing was raised")


def capture_call_output(func: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """What a call prints."""
    said = io.StringIO()
    with redirect_stdout(said):
        func(*args, **kwargs)
    return said.getvalue()


# -------------------------------------------------------------------- a regression


class RegressionDataset:
    """Points around the line a * x + b.

    Args:
        a, b: the line's.
        length: points.
        seed: of the noise and of x.
    """

    def __init__(self, a: float = 2, b: float = 3, length: int = 64, seed: int | None = None) -> None:
        random = numpy.random.default_rng(seed)
        self.length = length
        self.x = random.normal(size=(length,)).astype(numpy.float32)
        noise = random.normal(scale=0.1, size=(length,)).astype(numpy.float32)
        self.y = a * self.x + b + noise

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "y": self.y[index]}


class RegressionModel(torch.nn.Module):
    """The line with two parameters.

    Args:
        a, b: their first values.
        double_output: accepted, and changes nothing.
    """

    def __init__(self, a: float = 0, b: float = 0, double_output: bool = False) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.tensor(a).float())
        self.b = torch.nn.Parameter(torch.tensor(b).float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """a * x + b."""
        return x * self.a + self.b
