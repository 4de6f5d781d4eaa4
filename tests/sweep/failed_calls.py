"""Saves in which one file-system call fails: nothing is lost, reported results are true, and later saves work.

`python -m tests.sweep.failed_calls` lets every call of every kind of save fail, with EIO, EACCES and ENOSPC in turn.
`--count 20` draws 20 cases from the seed. Each case runs in a fork of this process, which has already imported torch.
strace attaches to the fork and makes its n-th call of one kind fail.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from headway.core.checkpoint.saving.job import SavePolicy
from headway.core.checkpoint.saving.saver import Saver
from headway.core.runtime import process
from headway.core.runtime.collectives.checked import Collectives
from headway.errors import CheckpointError
from tests.distributed.killed_saves import VARIANTS, choose_writer, make_state, read_newest_value, save, wait_for_tracer
from tests.sweep.tables import format_columns

CALLS = ("openat", "write", "pwrite64", "sync_file_range", "fsync", "rename", "renameat2", "unlink", "unlinkat", "rmdir",
         "mkdir", "getdents64", "newfstatat", "close", "ftruncate")  # fmt: skip
ERRORS = ("EIO", "EACCES", "ENOSPC")
SECONDS = 60
"""Seconds after which a case counts as hanging."""


@dataclass(frozen=True)
class Case:
    """A case: one system call that fails during a save.

    Attributes:
        variant: Name of the kind of save (`VARIANTS`).
        victim: Rank whose call fails.
        call: Name of the system call.
        when: Number of the failing call among calls of this kind, from 1, counted per thread.
        error: Name of the error that the call returns.
    """

    variant: str
    victim: int
    call: str
    when: int
    error: str


class Ranks:
    """The forked ranks of one case. A byte tells each rank which value to save; each rank answers with a line."""

    def __init__(self, root: Path, variant: dict) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.root, self.variant = root, variant
        self.pids: list[int] = []
        self.pipes: list[tuple[int, int]] = []
        for rank in range(variant["world_size"]):
            answers_out, answers_in = os.pipe()
            orders_out, orders_in = os.pipe()
            pid = os.fork()
            if pid == 0:
                self._serve(rank, orders_out, answers_in)
            os.close(answers_in)
            os.close(orders_out)
            self.pids.append(pid)
            self.pipes.append((orders_in, answers_out))

    def _serve(self, rank: int, orders: int, answers: int) -> None:
        """Save on request until the pipe closes, then exit. Never returns, because the code after the fork belongs to the parent."""
        world = self.variant["world_size"]
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self.port), GLOO_SOCKET_IFNAME="lo")  # fmt: skip
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            with open(self.root.parent / f"rank{rank}.log", "w") as sink:
                os.dup2(sink.fileno(), 2)
            process.reset()
            runtime = process.start(cpu=True)
            saver = Saver(runtime, Collectives(runtime))
            _write_line(answers, "ready")
            while order := os.read(orders, 1):
                _write_line(answers, self._save(saver, int(order)))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(3)

    def _save(self, saver: Saver, value: int) -> str:
        final = self.root / ("checkpoint_1" if self.variant["same_name"] else f"checkpoint_{value}")
        try:
            choose_writer(self.variant)
            policy = SavePolicy(1, (), True, self.variant["is_blocking"], timeout=20)
            saver.save(final, make_state(value), {"value": value}, policy)
            saver.wait()
        except CheckpointError as error:
            return f"refused: {error}"
        except BaseException as error:
            return f"raised {type(error).__name__}: {error}\n{traceback.format_exc()[-800:]}"
        return "saved"

    def request_save(self, value: int) -> None:
        for orders, _ in self.pipes:
            os.write(orders, str(value).encode())

    def read_answers(self) -> list[str]:
        """Return the answers of all ranks; "hangs" or "ended" replaces a missing answer."""
        return [self._answer(pipe[1]) for pipe in self.pipes]

    def _answer(self, pipe: int) -> str:
        text, deadline = b"", time.monotonic() + SECONDS
        while not text.endswith(b"\n"):
            if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return "hangs"
            read = os.read(pipe, 4096)
            if not read:
                return "ended"
            text += read
        return str(json.loads(text))

    def kill(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for each in itertools.chain(*self.pipes):
            os.close(each)


def _write_line(pipe: int, text: str) -> None:
    for _ in range(3):  # the call that fails may be this write
        with contextlib.suppress(OSError):
            os.write(pipe, (json.dumps(text) + "\n").encode())
            return


def run(folder: Path, case: Case) -> tuple[bool, list[str]]:
    """Run one case; return whether its call occurred, and the violated promises."""
    variant = VARIANTS[case.variant]
    root, log = folder / "root", folder / "injected"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    save(root, 1, {**variant, "is_blocking": True})
    ranks = Ranks(root, variant)
    try:
        assert ranks.read_answers() == ["ready"] * variant["world_size"]
        pid = ranks.pids[case.victim]
        tracer = subprocess.Popen(
            ["strace", "-f", "-qq", "-y", "-o", str(log), "-e", f"trace={case.call}",
             "-e", f"inject={case.call}:error={case.error}:when={case.when}", "-p", str(pid)],
            stderr=subprocess.DEVNULL)  # fmt: skip
        wait_for_tracer(pid)
        ranks.request_save(2)
        answers = ranks.read_answers()
        tracer.send_signal(signal.SIGINT)  # strace detaches from the rank, so that later saves are not disturbed
        tracer.wait()
        injected = [line for line in log.read_text().splitlines() if "INJECTED" in line and "pipe:" not in line]
        if not injected:
            return False, []
        found = _judge(root, variant, answers)
        if not found and "hangs" not in answers:
            ranks.request_save(3)
            found = _judge_later(root, variant, ranks.read_answers())
        return True, [f"{each} (ranks: {answers}; {injected[0][:200]})" for each in found]
    finally:
        ranks.kill()


def _judge(root: Path, variant: dict, answers: list[str]) -> list[str]:
    found = [f"not an answer: {each}" for each in answers if not each.startswith(("saved", "refused"))]
    if len({each.split(":")[0] for each in answers}) > 1:
        found.append("ranks disagree")
    try:
        value = read_newest_value(root)
    except BaseException as error:
        return [*found, f"nothing can be loaded: {type(error).__name__}: {error}; there is {sorted(os.listdir(root))}"]
    if answers[0] == "saved" and value != 2:
        found.append(f"said to be saved, and {value} is loaded")
    if answers[0].startswith("refused") and value != 1:
        found.append(f"said not to be saved, and {value} is loaded")
    return found


def _judge_later(root: Path, variant: dict, answers: list[str]) -> list[str]:
    if answers != ["saved"] * variant["world_size"]:
        return [f"the next save: {answers}"]
    value, left = read_newest_value(root), sorted(path.name for path in root.iterdir())
    expected = ["checkpoint_1" if variant["same_name"] else "checkpoint_3", "latest"]
    return [] if (value, left) == (3, expected) else [f"after the next save {value} is loaded, and there is {left}"]


def list_cases(variants: list[str]):
    """Yield an endless iterator of cases for each kind of call.

    The caller continues with the next kind when a call does not occur.
    """
    for name in variants:
        for victim, call in itertools.product(range(VARIANTS[name]["world_size"]), CALLS):
            yield (Case(name, victim, call, when, ERRORS[when % len(ERRORS)]) for when in itertools.count(1))


def run_all_cases(folder: Path, variants: list[str], results: "Results") -> None:
    """Run a case for each call of each save, up to the first call that does not occur."""
    for kind in list_cases(variants):
        for case in kind:
            came, problems = run(folder, case)
            results.note(case, came, problems)
            if not came:
                break


def run_random_cases(folder: Path, seed: int, count: int, results: "Results") -> None:
    """Run `count` random cases. If a call does not occur, its number is halved until the call occurs."""
    draw = random.Random(seed)
    for _ in range(count):
        name = draw.choice(list(VARIANTS))
        victim, call = draw.randrange(VARIANTS[name]["world_size"]), draw.choice(CALLS)
        when, error = draw.randint(1, 12), draw.choice(ERRORS)
        while when:
            case = Case(name, victim, call, when, error)
            came, problems = run(folder, case)
            results.note(case, came, problems)
            if came:
                break
            when //= 2


class Results:
    """Counts of the cases whose call occurred, and their problems."""

    def __init__(self) -> None:
        self.came: Counter[tuple[str, str]] = Counter()
        self.problems: list[tuple[Case, list[str]]] = []

    def note(self, case: Case, came: bool, problems: list[str]) -> None:
        self.came[case.variant, case.error] += came
        if problems:
            self.problems.append((case, problems))
            print(case, *problems, sep="\n   ", flush=True)

    def __str__(self) -> str:
        rows = [["", *ERRORS, "lost or stuck"]]
        for name in VARIANTS:
            rows.append([name, *(str(self.came[name, error]) for error in ERRORS),
                         str(sum(case.variant == name for case, _ in self.problems))])  # fmt: skip
        rows.append(
            [
                "all",
                *(str(sum(self.came[name, error] for name in VARIANTS)) for error in ERRORS),
                str(len(self.problems)),
            ]
        )
        return format_columns(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--count", type=int, help="number of random cases; all cases if omitted")
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    args = parser.parse_args()
    # sys.exit runs the `finally` blocks, which end the processes of the current case.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    torch.set_num_threads(1)
    results = Results()
    with tempfile.TemporaryDirectory(prefix="headway-sweep-") as folder, contextlib.redirect_stderr(None):
        if args.count is None:
            run_all_cases(Path(folder), args.variants, results)
        else:
            run_random_cases(Path(folder), args.seed, args.count, results)
    print(f"{results}\n{sum(results.came.values())} cases")
    return bool(results.problems)


if __name__ == "__main__":
    sys.exit(main())
