"""What `headway verify` reports about scripts of which it can check nothing, and its exit codes."""

from dataclasses import replace
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec
from pathlib import Path

import pytest
import torch

from headway.verify.command import choose_code
from headway.verify.compilation import EagerCalls
from headway.verify.request import RunRequest
from headway.verify.runs import VerifyError
from headway.verify.session import Options, VerifySession
from headway.verify.verdict import Status, Verdict, describe_failure
from tests.unit.verify.made_records import make_record


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (("PASS", "NOT CHECKED"), 0),
        (("PASS", "FAIL", "NOT CHECKED"), 1),
        (("FAIL", "NOT CHECKED"), 1),
        (("NOT CHECKED", "NOT CHECKED"), 2),
    ],
)
def test_the_exit_code(statuses: tuple[Status, ...], code: int) -> None:
    assert choose_code([Verdict("memory", "memory", status, "") for status in statuses]) == code


def check(num_updates: int = 0, code: int | None = 0, num_backwards: int = 0, *, has_accelerator: bool = True) -> str:
    """The message about a run on one process."""
    first = make_record(num_updates, facts={"num_backwards": num_backwards}, code=0)
    first.code = code
    if not has_accelerator:
        first.facts.clear()
    options = Options({}, False, 2, "", 6, 60.0, ("repeat",))
    with VerifySession(options, lambda name: None) as session, pytest.raises(VerifyError) as caught:
        session._check_first(replace(first, seconds=68.0))
    return str(caught.value)


def set_load(monkeypatch: pytest.MonkeyPatch, load: float) -> None:
    # No test can wait until the load average of its machine has the value that it needs.
    monkeypatch.setattr("os.getloadavg", lambda: (load, load, load))
    monkeypatch.setattr("os.cpu_count", lambda: 2)


@pytest.mark.parametrize(("code", "has_accelerator"), [(70, True), (None, True), (None, False)])
def test_a_busy_machine_is_named_first(
    monkeypatch: pytest.MonkeyPatch, code: int | None, has_accelerator: bool
) -> None:
    set_load(monkeypatch, 13.88)
    text = check(code=code, has_accelerator=has_accelerator)
    assert (
        "This machine is busy: load average 13.9 on 2 CPU cores. Wait until it is idle, or set --time_limit 300" in text
    )
    assert "smaller data" not in text.partition("busy")[0]
    set_load(monkeypatch, 1.9)
    text = check(code=code, has_accelerator=has_accelerator)
    assert "load average" not in text
    assert "--time_limit 300" in text


def test_a_proof_that_fails_by_time_names_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    set_load(monkeypatch, 13.88)
    record = make_record(2, code=70)
    assert "load average 13.9 on 2 CPU cores (--time_limit" in describe_failure(record)
    set_load(monkeypatch, 0.5)
    assert "load" not in describe_failure(record)


@pytest.mark.parametrize("code", [0, 70])
def test_a_missing_step_is_named(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    set_load(monkeypatch, 0.5)
    text = check(code=code, num_backwards=64)
    assert "called accelerator.backward() 64 times, but no optimizer.step() of a prepared optimizer followed" in text
    assert "give arguments" not in text
    assert "smaller data" not in text
    assert "optimizer.step() of a prepared optimizer followed" not in check(code=code)


class _Source(SourceFileLoader):
    """Loader of a module whose file would be in a folder. The file itself is not needed."""

    def get_data(self, path: str) -> bytes:
        return b"import torch\n\n@torch.compile\ndef add(x):\n    return x + 1\n"

    def path_stats(self, path: str) -> dict[str, float]:
        raise OSError

    def set_data(self, path: str, data: bytes, *, _mode: int = 0) -> None:
        pass


@pytest.mark.parametrize("is_library", [True, False])
def test_only_compilation_by_the_script_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_library: bool
) -> None:
    monkeypatch.setattr(torch, "compile", torch.compile)
    calls = EagerCalls()
    calls.install_for(RunRequest("first", str(tmp_path), str(tmp_path / "output")))
    calls.is_used = False  # another test may have imported torch._dynamo, after which the past is unknown
    folder = Path(torch.__file__).parents[1] if is_library else tmp_path
    spec = ModuleSpec("compiling", _Source("compiling", str(folder / "compiling.py")), origin="made")
    try:
        module = module_from_spec(spec)
        assert spec.loader is not None
        spec.loader.exec_module(module)
        assert calls.is_used is not is_library
        assert torch.equal(module.add(torch.ones(1)), torch.full((1,), 2.0))
        torch.compile(torch.nn.Linear(1, 1))
        assert calls.is_used
    finally:
        torch.compiler.set_stance("default")
