"""Process that imports the heavy packages once and forks itself for each rank of each script, which saves start-up time.

Tests use the class `Stage`. Each rank's output goes to `log<rank>` in its folder.
"""

import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.distributed.ranks import free_port

PRELOADED = [
    "accelerate", "accelerate.local_sgd", "datasets", "headway", "headway.accelerator", "peft", "safetensors.torch",
    "schedulefree", "sklearn.datasets", "sklearn.model_selection", "torch", "torch.distributed", "tqdm.auto",
    "transformers.models.bert.modeling_bert", "transformers.models.gpt2.modeling_gpt2",
]  # fmt: skip
GRACE_S = 4.0


class Stage:
    """Runs scripts one after another.

    Args:
        preloaded: Modules to import before the first script.
        variables: Further environment variables.
        grace_s: Seconds that ranks may continue after one has failed, or after all have written their evidence.
    """

    def __init__(
        self,
        preloaded: Sequence[str] = PRELOADED,
        variables: Mapping[str, str] | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        self._grace_s = grace_s
        environment = {
            **os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true",
            "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        }  # fmt: skip
        root = Path(__file__).parents[2]
        environment.update(variables or {})
        # The repository root goes last, because a script's own folder must come first for its imports.
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), str(root)]))
        for name in ("HEADWAY_RUN", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
            environment.pop(name, None)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.script_stage", *preloaded],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=root,
        )  # fmt: skip

    def run(
        self, script: Path, *args: str, folder: Path, world_size: int, is_deadly: bool = False, timeout_s: float = 120,
    ) -> list[int | None]:  # fmt: skip
        """Run a script on `world_size` processes in a new `folder`. Return each rank's exit code, None if the rank did not end.

        Args:
            script: Path of the script.
            args: Command-line arguments.
            folder: Working directory, which must not exist.
            world_size: Number of ranks.
            is_deadly: Whether each rank is killed by SIGKILL in its fifth update.
            timeout_s: Seconds after which ranks are killed.
        """
        folder.mkdir(parents=True)
        job = {"script": str(script), "args": args, "folder": str(folder), "world_size": world_size,
               "port": free_port(), "is_deadly": is_deadly, "timeout_s": timeout_s,
               "grace_s": self._grace_s}  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def _run_rank(rank: int, job: dict[str, Any]) -> None:
    """Turn this forked process into one rank of the script. Never returns."""
    world_size, folder = job["world_size"], Path(job["folder"])
    out = os.open(folder / f"log{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(out, 1)
    os.dup2(out, 2)
    if world_size > 1:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job["port"]),
        )  # fmt: skip
    if job["is_deadly"]:
        os.environ["EVIDENCE_KILL"] = "loss:5"
    os.chdir(folder)
    sys.argv = [job["script"], *job["args"]]
    sys.path.insert(0, str(Path(job["script"]).parent))
    code = 1
    try:
        runpy.run_path(job["script"], run_name="__main__")
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_job(job: dict[str, Any]) -> list[int | None]:
    pids = []
    for rank in range(job["world_size"]):
        pid = os.fork()
        if pid == 0:
            _run_rank(rank, job)
        pids.append(pid)
    codes: list[int | None] = [None] * len(pids)
    evidence = [Path(job["folder"], "evidence", f"rank{rank}.json") for rank in range(len(pids))]
    deadline, is_short = time.monotonic() + job["timeout_s"], False
    while None in codes and time.monotonic() < deadline:
        for rank, pid in enumerate(pids):
            if codes[rank] is None:
                ended, status = os.waitpid(pid, os.WNOHANG)
                codes[rank] = os.waitstatus_to_exitcode(status) if ended else None
        time.sleep(0.02)
        if not is_short and (any(codes) or all(path.exists() for path in evidence)):
            deadline, is_short = min(deadline, time.monotonic() + job["grace_s"]), True
    for rank, pid in enumerate(pids):
        if codes[rank] is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return codes


def _serve() -> None:
    for name in sys.argv[1:]:
        __import__(name)
    import torch

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # a garbage collection in a rank would otherwise copy every page of the imported modules
    for line in sys.stdin:
        print(json.dumps(_run_job(json.loads(line))), flush=True)


if __name__ == "__main__":
    _serve()
