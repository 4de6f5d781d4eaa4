"""SIGKILL at every write, fsync, rename, unlink and mkdir of a save: a complete checkpoint loads, and no other files remain."""

import json
import shutil
import subprocess
import sys

import pytest

from tests.distributed import killed_saves


def _find_skip_reason() -> str:
    if shutil.which("strace") is None:
        return "needs strace (Debian: strace), which injects the kills"
    tried = subprocess.run(["strace", "-qq", "-o", "/dev/null", "true"], capture_output=True)
    return "" if tried.returncode == 0 else "strace is not allowed to trace processes on this machine"


@pytest.mark.skipif(bool(_find_skip_reason()), reason=_find_skip_reason())
@pytest.mark.parametrize("variant", killed_saves.VARIANTS)
def test_kill_at_any_call_leaves_a_complete_checkpoint(variant, tmp_path):
    log = tmp_path / "log"
    with log.open("w") as out:
        result = subprocess.run(
            [sys.executable, "-m", "tests.distributed.killed_saves", str(tmp_path), variant],
            stdout=out, stderr=out, timeout=250,
        )  # fmt: skip
    assert result.returncode == 0, log.read_text()[-3000:]
    counts = json.loads(log.read_text().splitlines()[-1])[variant]
    # Some kills must happen before the commit and some after it. Otherwise, the sweep tested nothing.
    assert counts["kills"] > (12 if "threads" in variant else 20)  # strace counts the calls of each thread
    assert counts["old"] > 5
    assert counts["new"] > 3
