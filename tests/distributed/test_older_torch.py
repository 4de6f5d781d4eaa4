"""The launcher with the agent of torch 2.11, which accepts no `shutdown_timeout`."""

import os
import subprocess
import sys

import pytest

# torch 2.11 cannot be installed beside 2.13, so the current agent gets the signatures of the old one.
OLD_AGENT = """
import sys
if sys.orig_argv[1:4] == ["-m", "headway.launch", "agent"]:
    import signal
    import torch.distributed.elastic.agent.server.local_elastic_agent as home

    class Older(home.LocalElasticAgent):
        def __init__(self, spec, logs_specs, start_method="spawn", exit_barrier_timeout=300, log_line_prefix_template=None):
            super().__init__(spec, logs_specs, start_method, exit_barrier_timeout, log_line_prefix_template)

        def _shutdown(self, death_sig=signal.SIGTERM):
            super()._shutdown(death_sig)

    home.LocalElasticAgent = Older
    print("older", flush=True)
"""


@pytest.mark.parametrize(
    ("line", "code", "expected"), [("print('fine')", 0, "fine"), ("1 / 0", 1, "ZeroDivisionError")]
)
def test_ranks_start_and_end_with_the_old_agent(tmp_path, line, code, expected):
    (tmp_path / "sitecustomize.py").write_text(OLD_AGENT)
    (tmp_path / "script.py").write_text(line)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    result = subprocess.run(
        [sys.executable, "-m", "headway", "launch", "-n", "2", "--cpu", "script.py"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    output = result.stdout + result.stderr
    assert result.returncode == code, output
    assert "older" in output
    assert expected in output
    assert "shutdown_timeout" not in output
