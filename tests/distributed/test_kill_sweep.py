"""SIGKILL at every write, fsync, rename, unlink and mkdir of a save: a checkpoint loads, whole, and nothing is left over."""

import json
import shutil
import subprocess
import sys

import pytest

from tests.distributed import killed_saves


def _reason() -> str:
    if shutil.which("strace") is None:
        return "needs strace (Debian: strace), which injects the kills"
    tried = subprocess.run(["strace", "-qq", "-o", "/dev/null", "true"], capture_output=True)
    return "" if tried.returncode == 0 else "strace may not trace here"


@pytest.mark.skipif(bool(_reason()), reason=_reason())
@pytest.mark.parametrize("variant", killed_saves.VARIANTS)
def test_a_kill_at_any_call_loses_nothing(variant, tmp_path):
    log = tmp_path / "log"
    with log.open("w") as out:
        ran = subprocess.run(
            [sys.executable, "-m", "tests.distributed.killed_saves", str(tmp_path), variant],
            stdout=out, stderr=out, timeout=250,
        )  # fmt: skip
    assert ran.returncode == 0, log.read_text()[-3000:]
    told = json.loads(log.read_text().splitlines()[-1])[variant]
    # Some kills must fall before the commit and some after it, or the sweep swept nothing.
    assert told["kills"] > (12 if "threads" in variant else 20)  # strace counts the calls of each thread
    assert told["old"] > 5
    assert told["new"] > 3
