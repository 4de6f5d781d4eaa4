"""Saves to an object store that are killed, or whose requests fail: every commit can be loaded, and reported results are true.

`python -m tests.sweep.store_faults kills --count 200` and `... errors --count 500` run the sweeps; `--seed` selects
other cases. Each kill ends a process at one of its requests: before it is forwarded, in the middle of its body, or
before its response. Each error affects one request of a save or a load, or several in a row. Parts have 256 KiB here,
so the states have five parts.
"""

import argparse
import contextlib
import faulthandler
import json
import math
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from headway.common import scope
from headway.common.object_path import to_path
from headway.core.checkpoint import folders
from headway.core.checkpoint.folders import HeldLocks
from headway.core.checkpoint.format.manifest import read_manifest
from headway.core.checkpoint.loading.files import read_state, verify_checkpoint
from headway.core.checkpoint.saving.job import SavePolicy
from headway.core.checkpoint.saving.saver import Saver
from headway.core.checkpoint.state import CollectedState
from headway.core.runtime import process
from headway.core.runtime.collectives.checked import Collectives
from headway.errors import CheckpointError
from tests.distributed.ranks import free_port
from tests.stores import server
from tests.stores.proxy import FAULTS, KILLS, Proxy, Request
from tests.stores.small_parts import make_small

MOST_REQUESTS = 40
"""A save makes about thirty requests. If the chosen request does not occur, another one is drawn."""
SECONDS = 60.0


def make_state(value: int) -> CollectedState:
    tensors = {f"model/0/{i}": torch.full((100_000,), float(value)) for i in range(3)}
    tensors["optimizer/0/0/exp_avg"] = torch.full((3000,), float(value))
    return CollectedState(tensors, {}, {"value": value})


def save(root: str, value: int, is_blocking: bool, is_same_name: bool = False) -> str:
    """Save on this rank, and return "saved" or the reason why the save was refused."""
    runtime = process.start(cpu=True)
    saver = Saver(runtime, Collectives(runtime))
    parent = to_path(root)
    try:
        saver.lock_folder(parent, "run")
        final = parent / ("checkpoint_1" if is_same_name else f"checkpoint_{value}")
        saver.save(
            final,
            make_state(value),
            {"value": value, "name": final.name, "run": "run"},
            SavePolicy(1, (), True, is_blocking, 20),
        )
        saver.wait()
    except CheckpointError as error:
        return f"refused: {error}"
    return "saved"


def load_value(root: str) -> int:
    """Read and verify the newest checkpoint completely, and return its value; 0 if there is none."""
    there = folders.list_committed(to_path(root))
    if not there:
        return 0
    manifest = verify_checkpoint(there[0])
    tensors, _ = read_state(there[0], manifest, False)
    value = int(manifest.state["value"])
    assert all(bool((each == value).all()) for each in tensors.values()), "values of two saves are mixed"
    return value


def list_stray_keys(port: int, root: str) -> list[str]:
    """Return the keys that belong to no checkpoint."""
    parent = to_path(root)
    named = {f"{parent.key}/latest"}
    for folder in folders.list_committed(parent):
        named.add(f"{folder.key}/manifest.json")
        for written in read_manifest(folder).files.values():
            parts = range(max(1, -(-written.num_bytes // 2**18)))
            named.update((folder / written.name).make_part_key(number) for number in parts)
    return [key for key in server.keys(port, f"{parent.key}/") if key not in named]


@dataclass
class Results:
    """Results of the cases.

    Attributes:
        until: Time after which no more cases start, on the monotonic clock.
    """

    until: float
    came: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def note(self, what: str, problems: list[str]) -> None:
        self.came[what] += 1
        self.problems += [f"{what}: {each}" for each in problems]
        for each in problems:
            print("PROBLEM", what, each, flush=True)


# ---------------------------------------------------------------- kills


def _save_as_victim(rank: int, world: int, port: int, proxies: list[int], gate: Any, root: str, value: int, is_blocking: bool,
            is_same_name: bool) -> None:  # fmt: skip
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")  # fmt: skip
    os.environ.update(server.environment(proxies[rank]))
    with open(os.environ.get("STORE_FAULTS_LOG", os.devnull), "a") as sink:
        os.dup2(sink.fileno(), 2)
    faulthandler.dump_traceback_later(SECONDS / 2)
    make_small()
    torch.set_num_threads(1)
    process.start(cpu=True)
    gate.wait(SECONDS)
    answer = save(root, value, is_blocking, is_same_name)
    os._exit(0 if answer == "saved" else 7)


def _save_with_kill(
    proxies: list[Proxy], world: int, kind: str, number: int, root: str, is_blocking: bool, is_same: bool
) -> bool:
    """Save with a kill at the given request, and return whether the kill happened."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.preloaded"])
    gate = context.Barrier(world)
    port = free_port()
    ranks = [
        context.Process(
            target=_save_as_victim,
            args=(r, world, port, [each.port for each in proxies], gate, root, 2, is_blocking, is_same),
        )
        for r in range(world)
    ]
    for each in proxies:
        each.reset()
    victim = number % world
    proxies[victim].judge = lambda request: kind if request.number == number else None
    for rank, each in enumerate(ranks):
        each.start()
        if rank == victim:
            proxies[victim].victim = each.pid
    ranks[victim].join(SECONDS)
    has_come = bool(proxies[victim].met)
    for each in ranks:  # like a launcher, which ends the remaining ranks
        if has_come:
            each.kill()
        each.join(SECONDS)
        if each.is_alive():
            each.kill()
            each.join()
    return has_come


def sweep_kills(port: int, count: int, seed: int, results: Results) -> None:
    """Kill `count` saves, each after a complete first save.

    The next save must succeed and leave no stray keys.
    """
    draw = random.Random(seed)
    with Proxy(port) as first, Proxy(port) as second:
        case = 0
        while sum(results.came.values()) < count and time.monotonic() < results.until:
            case += 1
            world, kind = draw.choice((1, 2)), draw.choice(KILLS)
            number, is_blocking, is_same = draw.randint(1, MOST_REQUESTS), draw.random() < 0.5, draw.random() < 0.5
            root = f"s3://{server.BUCKET}/kill_{case}"
            assert save(root, 1, True) == "saved"
            release_locks()
            while not _save_with_kill([first, second][:world], world, kind, number, root, is_blocking, is_same):
                number = max(1, number // 2)  # the save survived
                save(root, 1, True, True)
                release_locks()
            problems, value = [], -1
            try:
                value = load_value(root)
                if value not in (1, 2):
                    problems.append(f"{value} is loaded")
                if (answer := save(root, 3, True)) != "saved":
                    problems.append(f"the next save: {answer}")
                release_locks()
                if load_value(root) != 3:
                    problems.append("the next save is not what is loaded")
                if left := list_stray_keys(port, root):
                    problems.append(f"left over: {left}")
            except Exception as error:
                problems.append(f"{type(error).__name__}: {error}")
            results.note(
                f"{kind}, {'old' if value == 1 else 'new'}",
                [f"{each} (case {case}, request {number}, {world} ranks)" for each in problems],
            )


def release_locks() -> None:
    """Release this process's locks, so that the next process can save."""
    scope.get_or_create(HeldLocks).release()


# ---------------------------------------------------------------- errors


def sweep_errors(port: int, count: int, seed: int, results: Results) -> None:
    """Inject `count` faults into saves and loads of one process."""
    draw = random.Random(seed)
    with Proxy(port, hang=3.0) as proxy:
        os.environ.update(server.environment(proxy.port, patience=6, timeout=2))
        scope.clear()
        root, value, injected = f"s3://{server.BUCKET}/errors", 1, 0
        assert save(root, value, True) == "saved"
        while sum(results.came.values()) < count and time.monotonic() < results.until:
            kind, number = draw.choice(FAULTS), draw.randint(1, MOST_REQUESTS)
            several = draw.choice((1, 1, 1, 1, 1, 2, 2, 3, 3, 1000))  # 1000 means until Headway gives up
            if kind == "lost listing":
                number = 1
            is_load, is_blocking = draw.random() < 0.25, draw.random() < 0.5
            proxy.reset()
            proxy.judge = _judge(kind, number, several)
            answer = _load_expected(root, value) if is_load else save(root, value + 1, is_blocking)
            met = len(proxy.met)
            proxy.reset()
            injected += met
            if not met:
                value += not is_load and answer == "saved"
                continue
            problems = []
            try:
                found = load_value(root)
                problems += _check_answer(answer, is_load, found, value)
                value = found
                if answer != "saved" and not is_load:
                    value += 1
                    if (again := save(root, value, True)) != "saved":
                        problems.append(f"the next save: {again}")
                left = [key for key in list_stray_keys(port, root) if not is_load]
                # A commit whose deletions failed leaves stray keys until the next save.
                if left and save(root, value := value + 1, True) == "saved" and (left := list_stray_keys(port, root)):
                    problems.append(f"left over: {left}")
            except Exception as error:
                problems.append(f"{type(error).__name__}: {error}")
            outcome = "load" if is_load else "save"
            results.note(
                f"{kind}, {outcome} {answer.split(':')[0]}",
                [f"{each} (request {number}, {several} in a row)" for each in problems],
            )
        print(f"{injected} requests were faulty")
        release_locks()


def _judge(kind: str, number: int, several: int) -> Any:
    seen = [0]

    def judge(request: Request) -> str | None:
        if kind == "lost listing" and not request.is_listing:
            return None
        if request.number >= number and seen[0] < several:
            seen[0] += 1
            return kind
        return None

    return judge


def _load_expected(root: str, value: int) -> str:
    try:
        return "saved" if load_value(root) == value else "another value"
    except CheckpointError as error:
        return f"refused: {error}"


def _check_answer(answer: str, is_load: bool, found: int, value: int) -> list[str]:
    if is_load:
        return (
            []
            if answer.startswith(("saved", "refused")) and found == value
            else [f"{answer}; then {found} for {value}"]
        )
    if answer == "saved" and found != value + 1:
        return [f"said to be saved, and {found} is loaded"]
    # If the response to the manifest was lost, the store may still have it. Then the checkpoint exists and is complete.
    return [] if found in (value, value + 1) else [f"{found} is loaded"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("kills", "errors"))
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no more cases after this time")
    args = parser.parse_args(arguments)
    began = time.monotonic()
    results = Results(began + args.seconds)
    make_small()
    with server.running() as port:
        os.environ.update(server.environment(port))
        scope.clear()
        with contextlib.suppress(KeyboardInterrupt):
            (sweep_kills if args.what == "kills" else sweep_errors)(port, args.count, args.seed, results)
    print(
        json.dumps(
            {
                "what": args.what,
                "came": results.came,
                "problems": results.problems,
                "seconds": round(time.monotonic() - began),
            }
        )
    )
    return bool(results.problems)


if __name__ == "__main__":
    sys.exit(main())
