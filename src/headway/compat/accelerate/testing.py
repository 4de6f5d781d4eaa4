"""Helpers of `accelerate.test_utils`: decorators that skip tests, launch commands, and a toy model and dataset."""

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
from headway.common.optional import is_available as installed
from headway.compat.accelerate.data.batches import gather
from headway.compat.accelerate.launching import available
from headway.compat.accelerate.launching.environment import parse_flag_from_env
from headway.compat.accelerate.state import AcceleratorState, PartialState
from headway.core.runtime.device import detect_hardware
from headway.errors import HeadwayError, LaunchError
from headway.launch.stand_in import FOLDER

Test = Any


def get_backend() -> tuple[str, int, Callable[..., int]]:
    """Return the accelerator type, the number of devices, and a function that returns the bytes allocated on a device.

    Without an accelerator, the type is "cpu", the number is 1, and the function returns 0.
    """
    device_type = detect_hardware().kind
    if device_type == "cpu":
        return device_type, 1, lambda *_: 0
    return device_type, torch.accelerator.device_count(), torch.accelerator.memory_allocated


torch_device, device_count, memory_allocated_func = get_backend()


def get_launch_command(**kwargs: Any) -> list[str]:
    """Return a `headway launch` command line as a list of arguments.

    Args:
        kwargs: Flags by name, such as `num_processes=2`. True is a flag without a value; False and None are left out.
    """
    command = [sys.executable, "-m", "headway", "launch", "--as", "accelerate"]
    flag_values = {name: value for name, value in kwargs.items() if value is not None and value is not False}
    return command + [f"--{name}" if value is True else f"--{name}={value}" for name, value in flag_values.items()]


DEFAULT_LAUNCH_COMMAND = get_launch_command(num_processes=device_count)


# -------------------------------------------------------------------- conditions


def skip(test_case: Test) -> Test:
    """Decorate a test so that it is skipped."""
    return unittest.skip("the test is to be left out")(test_case)


def slow(test_case: Test) -> Test:
    """Decorate a test so that it runs only if the environment variable RUN_SLOW is true."""
    return unittest.skipUnless(parse_flag_from_env("RUN_SLOW", False), "RUN_SLOW is not set")(test_case)


def _skip_unless(condition: bool, what: str) -> Callable[[Test], Test]:
    return unittest.skipUnless(condition, f"the test needs {what}")


def run_first(test_case: Test) -> Test:
    """Decorate a test so that the plugin pytest-order runs it before other tests."""
    import pytest

    return pytest.mark.order(1)(test_case)


def require_torch_min_version(test_case: Test = None, version: str | None = None) -> Test:
    """Decorate a test so that it runs only with a minimum version of torch. Use it with or without parentheses.

    Args:
        test_case: Test to decorate. None: return a decorator.
        version: Minimum version, such as "2.4". None: any version.
    """
    if test_case is None:
        return lambda each: require_torch_min_version(each, version)
    return _skip_unless(available.is_torch_version(">=", version or "0"), f"torch {version} or later")(test_case)


def _has_several_devices(kind: str | None) -> bool:
    return device_count > 1 and (torch_device == kind if kind else torch_device != "cpu")


def _list_conditions() -> dict[str, tuple[bool, str]]:
    """Return the conditions of all `require_*` decorators, by name without "require_".

    Each condition is a pair of (whether tests with the decorator run, description of the requirement).
    """
    device_types = ("cuda", "xpu", "mps", "npu", "mlu", "sdaa", "musa", "neuron")
    conditions = {
        device_type: (torch_device == device_type, device_type.upper()) for device_type in ("cpu", *device_types)
    }
    conditions |= {
        f"non_{device_type}": (torch_device != device_type, f"another device than {device_type}")
        for device_type in ("cpu", "xpu", "hpu")
    }
    conditions |= {
        "cuda_or_hpu": (torch_device in ("cuda", "hpu"), "CUDA or HPU"),
        "cuda_or_xpu": (torch_device in ("cuda", "xpu"), "CUDA or XPU"),
        "fp16": (available.is_fp16_available(), "a device with float16"),
        "fp8": (available.is_fp8_available(), "float8"),
        "tpu": (False, "a TPU"),
        "non_torch_xla": (True, "no XLA"),
        "single_device": (device_count == 1 and torch_device != "cpu", "one accelerator"),
        "single_gpu": (torch_device == "cuda" and device_count == 1, "one GPU"),
        "single_xpu": (torch_device == "xpu" and device_count == 1, "one XPU"),
        "multi_device": (_has_several_devices(None), "several accelerators"),
        "multi_gpu": (_has_several_devices("cuda"), "several GPUs"),
        "multi_xpu": (_has_several_devices("xpu"), "several XPUs"),
        "multi_gpu_or_xpu": (_has_several_devices("cuda") or _has_several_devices("xpu"), "several GPUs or XPUs"),
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
        conditions[name] = (bool(getattr(available, f"is_{name}_available")()), name)
    return conditions


def __getattr__(name: str) -> Any:
    condition = _list_conditions().get(name.removeprefix("require_")) if name.startswith("require_") else None
    if condition is None:
        raise AttributeError(f"accelerate.test_utils has no {name!r} where Headway stands in for Accelerate")
    decorate = _skip_unless(*condition)
    decorate.__doc__ = f"Run the test only if {condition[1]} is available."
    return decorate


# -------------------------------------------------------------------- cases


class TempDirTestCase(unittest.TestCase):
    """Test case with a temporary directory `tmpdir`, emptied before each test if `clear_on_setup` is True."""

    clear_on_setup = True
    tmpdir: Path

    @classmethod
    def setUpClass(cls) -> None:
        """Create the temporary directory before the first test of the class."""
        cls.tmpdir = Path(tempfile.mkdtemp())

    @classmethod
    def tearDownClass(cls) -> None:
        """Remove the temporary directory after the last test of the class."""
        shutil.rmtree(cls.tmpdir, ignore_errors=True)

    def setUp(self) -> None:
        """Empty the temporary directory before a test if `clear_on_setup` is True."""
        if self.clear_on_setup:
            for path in self.tmpdir.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()


class AccelerateTestCase(unittest.TestCase):
    """Test case that resets the Accelerator and ends the process runtime after each test."""

    def tearDown(self) -> None:
        """Reset the Accelerator and end the process runtime."""
        AcceleratorState._reset_state()
        PartialState._reset_state()


class MockingTestCase(unittest.TestCase):
    """Test case that, after each test, stops the mocks that `add_mocks` started."""

    def add_mocks(self, mocks: Any) -> None:
        """Start mocks for the current test.

        Args:
            mocks: One or more patchers with `start` and `stop`, as created by `unittest.mock.patch`.
        """
        for each in mocks if isinstance(mocks, list | tuple) else [mocks]:
            each.start()
            self.addCleanup(each.stop)


def are_the_same_tensors(tensor: torch.Tensor) -> bool:
    """Whether a tensor has equal values on all processes. All processes must call it."""
    state = PartialState()
    shared = gather(tensor[None].clone().to(state.device)).cpu()
    return all(torch.equal(each, tensor.cpu()) for each in shared)


# -------------------------------------------------------------------- processes


class SubprocessCallException(HeadwayError):
    """Raised if a command fails. The message contains the command's output."""


@dataclass
class RunOutput:
    """Exit code and output of a command that was run.

    Attributes:
        returncode: Exit code.
        stdout: Lines of standard output.
        stderr: Lines of standard error.
    """

    returncode: int
    stdout: list[str]
    stderr: list[str]


def execute_subprocess_async(
    cmd: Sequence[str], env: Any = None, stdin: Any = None, timeout: float = 180, quiet: bool = False, echo: bool = True
) -> RunOutput:
    """Run a command, wait for it, and return its output. Despite its name in Accelerate, it is not asynchronous.

    Args:
        cmd: Program and arguments.
        env: Environment variables of the command. None (the default): the environment of this process.
        stdin: Standard input of the command, as for `subprocess.run`. None (the default): that of this process.
        timeout: Time limit in seconds. Default: 180.
        quiet: Whether to suppress the command's output. Default: False.
        echo: Whether to print the command. Default: True.

    Raises:
        LaunchError: If the command fails. The message ends with the command's standard error, or else its output.
        subprocess.TimeoutExpired: If the command runs longer than `timeout`.
    """
    line = [str(each) for each in cmd]
    if echo:
        print("Running:", *line)
    result = subprocess.run(line, env=env, stdin=stdin, capture_output=True, text=True, timeout=timeout)
    if not quiet:
        sys.stdout.write(result.stdout)
        sys.stderr.write(result.stderr)
    if result.returncode:
        raise LaunchError(
            f"{' '.join(line)!r} ended with exit code {result.returncode} and this output:\n{result.stderr or result.stdout}"
        )
    return RunOutput(result.returncode, result.stdout.splitlines(), result.stderr.splitlines())


def run_command(command: Sequence[str], return_stdout: bool = False, env: Any = None) -> str | None:
    """Run a command to its end, and return its output if `return_stdout` is True, else None.

    Args:
        command: Program and arguments.
        return_stdout: Whether to return standard output and standard error as one text. Default: False.
        env: Environment variables of the command. None: the environment of this process.

    Raises:
        SubprocessCallException: If the command fails.
    """
    result = subprocess.run(
        [str(each) for each in command], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if result.returncode:
        raise SubprocessCallException(
            f"{' '.join(map(str, command))!r} ended with exit code {result.returncode} and this output:\n{result.stdout}"
        )
    return result.stdout if return_stdout else None


def pytest_xdist_worker_id() -> int:
    """Return the number of this pytest-xdist worker, or 0 without pytest-xdist."""
    return int((env.get("PYTEST_XDIST_WORKER") or "gw0").removeprefix("gw"))


def get_torch_dist_unique_port() -> int:
    """Return a port for a process group's rendezvous that differs between pytest-xdist workers."""
    return 29500 + pytest_xdist_worker_id()


def path_in_accelerate_package(*components: str) -> Path:
    """Return a path inside the package `accelerate` that Headway puts on `sys.path` to replace Accelerate."""
    return FOLDER.joinpath("accelerate", *components)


@contextmanager
def assert_exception(exception_class: type[BaseException], msg: str | None = None) -> Iterator[None]:
    """Return a context manager that raises `AssertionError` unless the block raises an exception of the given class.

    The expected exception is suppressed. Exceptions of other classes are raised unchanged.

    Args:
        exception_class: Class of the expected exception.
        msg: Text that the exception's message must contain. None: any message.

    Raises:
        AssertionError: If the block raises no exception, or one whose message does not contain `msg`.
    """
    try:
        yield
    except exception_class as error:
        if msg is not None and msg not in str(error):
            raise AssertionError(f"{msg!r} is not in {str(error)!r}") from error
    else:
        raise AssertionError(f"{exception_class.__name__} was expected, and nothing was raised")


def capture_call_output(func: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Call a function, and return the text that it prints to standard output.

    Args:
        func: Function to call.
        args, kwargs: Arguments of the function.
    """
    output = io.StringIO()
    with redirect_stdout(output):
        func(*args, **kwargs)
    return output.getvalue()


# -------------------------------------------------------------------- a model and a dataset


class RegressionDataset:
    """Dataset of noisy points on the line y = a * x + b.

    Args:
        a: Slope of the line. Default: 2.
        b: Offset of the line. Default: 3.
        length: Number of points. Default: 64.
        seed: Seed of x and of the noise. None: a random seed.
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
    """Model with two parameters that predicts y = a * x + b.

    Args:
        a: Initial slope. Default: 0.
        b: Initial offset. Default: 0.
        double_output: Ignored.
    """

    def __init__(self, a: float = 0, b: float = 0, double_output: bool = False) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.tensor(a).float())
        self.b = torch.nn.Parameter(torch.tensor(b).float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the prediction a * x + b."""
        return x * self.a + self.b
