"""Saves in which one file-system call fails: nothing is lost, what is said is true, and later saves go on.

`python -m tests.sweep.failed_calls`: every call of every kind of save, with EIO, EACCES and ENOSPC in turn; `--count 20`: so many,
drawn by the seed. Each case is a fork of this process, which has torch loaded; strace attaches to it and makes the n-th call of one
kind fail.
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

from headway.core.checkpoint.saving.saver import Saver
from headway.core.checkpoint.saving.writer import SavePolicy
from headway.core.runtime import process
from headway.core.runtime.collectives.checked import Collectives
from headway.errors import CheckpointError
from tests.distributed.killed_saves import VARIANTS, choose_writer, make_state, read_newest_value, save, wait_for_tracer
from tests.sweep.tables import laid_out

CALLS = ("openat", "write", "pwrite64", "sync_file_range", "fsync", "rename", "renameat2", "unlink", "unlinkat", "rmdir",
         "mkdir", "getdents64", "newfstatat", "close", "ftruncate")  # fmt: skip
ERRORS = ("EIO", "EACCES", "ENOSPC")
SECONDS = 60
"""Until a case counts as hanging."""


@dataclass(frozen=True)
class Case:
    """One call that fails.

    Attributes:
        variant: how is saved.
        victim: the rank whose call it is.
        call: the system call.
        when: which of its kind, from 1; in each thread.
        error: what it returns.
    """

    variant: str
    victim: int
    call: str
    when: int
    error: str


class Ranks:
    """The forks of one case; each is told what to save by a byte, and answers in a line what came of it."""

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
        """Never returns: what follows in the caller is the parent's."""
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
            _tell(answers, "ready")
            while order := os.read(orders, 1):
                _tell(answers, self._save(saver, int(order)))
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

    def order(self, value: int) -> None:
        for orders, _ in self.pipes:
            os.write(orders, str(value).encode())

    def answers(self) -> list[str]:
        """Of all ranks; "hangs" or "ended" for one without."""
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

    def end(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for each in itertools.chain(*self.pipes):
            os.close(each)


def _tell(pipe: int, text: str) -> None:
    for _ in range(3):  # the call that fails may be this one
        with contextlib.suppress(OSError):
            os.write(pipe, (json.dumps(text) + "\n").encode())
            return


def run(folder: Path, case: Case) -> tuple[bool, list[str]]:
    """(did the call come, what was not as promised)."""
    variant = VARIANTS[case.variant]
    root, log = folder / "root", folder / "injected"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    save(root, 1, {**variant, "is_blocking": True})
    ranks = Ranks(root, variant)
    try:
        assert ranks.answers() == ["ready"] * variant["world_size"]
        pid = ranks.pids[case.victim]
        tracer = subprocess.Popen(
            ["strace", "-f", "-qq", "-y", "-o", str(log), "-e", f"trace={case.call}",
             "-e", f"inject={case.call}:error={case.error}:when={case.when}", "-p", str(pid)],
            stderr=subprocess.DEVNULL)  # fmt: skip
        wait_for_tracer(pid)
        ranks.order(2)
        told = ranks.answers()
        tracer.send_signal(signal.SIGINT)  # it lets go of the rank, whose later saves are not disturbed
        tracer.wait()
        injected = [line for line in log.read_text().splitlines() if "INJECTED" in line and "pipe:" not in line]
        if not injected:
            return False, []
        found = _judge(root, variant, told)
        if not found and "hangs" not in told:
            ranks.order(3)
            found = _judge_later(root, variant, ranks.answers())
        return True, [f"{each} (ranks: {told}; {injected[0][:200]})" for each in found]
    finally:
        ranks.end()


def _judge(root: Path, variant: dict, told: list[str]) -> list[str]:
    found = [f"not an answer: {each}" for each in told if not each.startswith(("saved", "refused"))]
    if len({each.split(":")[0] for each in told}) > 1:
        found.append("ranks disagree")
    try:
        value = read_newest_value(root)
    except BaseException as error:
        return [*found, f"nothing can be loaded: {type(error).__name__}: {error}; there is {sorted(os.listdir(root))}"]
    if told[0] == "saved" and value != 2:
        found.append(f"said to be saved, and {value} is loaded")
    if told[0].startswith("refused") and value != 1:
        found.append(f"said not to be saved, and {value} is loaded")
    return found


def _judge_later(root: Path, variant: dict, told: list[str]) -> list[str]:
    if told != ["saved"] * variant["world_size"]:
        return [f"the next save: {told}"]
    value, left = read_newest_value(root), sorted(path.name for path in root.iterdir())
    wanted = ["checkpoint_1" if variant["same_name"] else "checkpoint_3", "latest"]
    return [] if (value, left) == (3, wanted) else [f"after the next save {value} is loaded, and there is {left}"]


def cases(variants: list[str]):
    """Endless for each kind of call: who runs them goes on with the next kind where a call does not come."""
    for name in variants:
        for victim, call in itertools.product(range(VARIANTS[name]["world_size"]), CALLS):
            yield (Case(name, victim, call, when, ERRORS[when % len(ERRORS)]) for when in itertools.count(1))


def all_of(folder: Path, variants: list[str], told: "Told") -> None:
    """Each call of each save, up to the one that does not come."""
    for kind in cases(variants):
        for case in kind:
            came, problems = run(folder, case)
            told.note(case, came, problems)
            if not came:
                break


def drawn(folder: Path, seed: int, count: int, told: "Told") -> None:
    """Some of them; a number that is too high is halved until its call comes."""
    draw = random.Random(seed)
    for _ in range(count):
        name = draw.choice(list(VARIANTS))
        victim, call = draw.randrange(VARIANTS[name]["world_size"]), draw.choice(CALLS)
        when, error = draw.randint(1, 12), draw.choice(ERRORS)
        while when:
            case = Case(name, victim, call, when, error)
            came, problems = run(folder, case)
            told.note(case, came, problems)
            if came:
                break
            when //= 2


class Told:
    """What came of the cases."""

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
        return laid_out(rows)


def main() -> int:
    reader = argparse.ArgumentParser(description=__doc__)
    reader.add_argument("--seed", type=int, default=7)
    reader.add_argument("--count", type=int, help="so many, drawn; without it all")
    reader.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    asked = reader.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of what ends the processes of the case in hand
    torch.set_num_threads(1)
    told = Told()
    with tempfile.TemporaryDirectory(prefix="headway-sweep-") as folder, contextlib.redirect_stderr(None):
        if asked.count is None:
            all_of(Path(folder), asked.variants, told)
        else:
            drawn(Path(folder), asked.seed, asked.count, told)
    print(f"{told}\n{sum(told.came.values())} cases")
    return bool(told.problems)


if __name__ == "__main__":
    sys.exit(main())
