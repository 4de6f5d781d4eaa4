"""Test that compiled functions run uncompiled, and that only compilation by the script is noted."""

from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec
from pathlib import Path

import pytest
import torch

from headway.common import scope
from headway.extras.eager_calls import EagerCalls
from headway.verify.compilation import get_eager_calls, turn_off_compilation
from headway.verify.request import RunRequest


def test_compiled_functions_run_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch, "compile", torch.compile)  # restored after the test
    eager = EagerCalls()
    monkeypatch.setattr(scope, "get_or_create", lambda _: eager)
    turn_off_compilation(RunRequest("measured", "", "", measures_tensors=True))
    assert not eager.is_used
    turn_off_compilation(RunRequest("baseline", "", ""))
    assert get_eager_calls() is eager
    seen = []

    @torch.compile(fullgraph=True, backend="eager")
    def double(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.compiler.is_compiling())
        return 2 * x

    try:
        assert double(torch.ones(2)).tolist() == [2.0, 2.0]
        assert double(torch.ones(2)).tolist() == [2.0, 2.0]
    finally:
        torch.compiler.set_stance("default")
    assert seen == [False, False]
    assert eager.is_used


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
    calls.install()
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
