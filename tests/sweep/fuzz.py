"""Random hostile inputs: manifests, headers, indexes, configurations and command lines, with the results of each.

    python -m tests.sweep.fuzz                              # 1,000 manifests, headers, configurations; 2,000 command lines
    python -m tests.sweep.fuzz --seed 7 --manifests 10000

Every case must succeed or raise one of Headway's errors within a time limit, and a refused load must change nothing. All other
results are printed with the number of their case, and the exit code is 1. The test suite runs fewer of the same cases.
"""

import argparse
import contextlib
import copy
import io
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from headway.cli.main import main as headway
from headway.core.checkpoint.format.manifest import MANIFEST, _compute_digest, read_manifest
from headway.core.checkpoint.format.tensors import hash_file
from headway.core.checkpoint.loading.files import read_state
from headway.core.config.launch import SETTINGS
from headway.core.weights.files import open_checkpoint
from headway.errors import HeadwayError
from headway.launch.machine import Machine
from tests.sweep.loaded_run import RUNS, Run, save_checkpoint

PATIENCE = 20.0
"""Seconds after which a case counts as hanging."""

ODD: list[Any] = [
    None, True, False, -1, 0, 1, 2, 7, 2**31, 2**53 + 1, 2**63, 2**64, 10**30, -(2**63), 10**400, 0.5, -1.5, 1e308, "", "x", "0",
    "nan", "\0", "\x1b[2J", "\ud800", "é" * 300, "../up", "/dev/zero", [], [[]], [None], [1, 2], {}, {"": 1}, {"!": "nope"},
    {"!": "tensor", "name": "optimizer/0/0/0.weight/exp_avg"}, {"!": "tensor", "name": "nothing"}, {"!": "float", "value": "inf"},
    {"!": "array", "name": "streams/0.numpy.1", "dtype": "<f8", "shape": [2**62]}, {"!": "tuple", "items": "text"},
    {"!": "range", "value": [0, 2**62, 1]}, {"!": "bytes", "value": "!"}, {"!": "scalar", "dtype": "O", "value": ""},
    {"!": "dict", "items": [[[1], 2]]}, {"!": []}, {"!": "torch.device", "value": 3}, {"!": "torch.Size", "value": [None]},
]  # fmt: skip


class Hang(BaseException):
    """Raised when a case takes too long. Not an `Exception`, so that no handler catches it."""


class Tally:
    """Counts of how the cases of one kind ended, and their faults.

    Args:
        kind: Kind of the inputs, for messages.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.ends: Counter[str] = Counter()
        self.faults: list[str] = []

    def run(self, number: object, act: Callable[[], str]) -> str:
        """Run a case and return how it ended: the result of `act`, "refused", or the text of a fault."""
        with _limit_time(PATIENCE):
            try:
                end = act()
            except HeadwayError as error:
                end = "refused" if str(error) else self.record_fault(number, "refused without a word")
            except Hang:
                end = self.record_fault(number, "hang")
            except SystemExit as ended:
                end = f"exit {ended.code}"
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                end = self.record_fault(
                    number, f"{type(error).__name__}: {error}"[:200] + "\n" + _format_last_frames(error)
                )
        self.ends[end.split(":")[0].split("\n")[0]] += 1
        return end

    def record_fault(self, case: object, description: str) -> str:
        """Record that a case ended in a way that is not allowed, and return the description."""
        self.faults.append(f"{self.kind} {case}: {description}")
        return description

    def __str__(self) -> str:
        ends = ", ".join(f"{count} {end}" for end, count in self.ends.most_common())
        return f"{sum(self.ends.values())} {self.kind}: {ends}; {len(self.faults)} faults"


def _format_last_frames(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return "".join(traceback.format_list(frames[-4:]))


@contextlib.contextmanager
def _limit_time(seconds: float) -> Iterator[None]:
    def raise_hang(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, raise_hang)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# -------------------------------------------------------------------- mutations


def mutate(draw: random.Random, value: Any) -> Any:
    """Return a copy of a JSON value with some entries changed, removed, duplicated or exchanged."""
    value = copy.deepcopy(value)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        _mutate(draw, value)
    return value


def _mutate(draw: random.Random, value: Any) -> None:
    holder, key = _choose_entry(draw, value)
    if key is None:
        return
    kind = draw.random()
    if kind < 0.6:
        holder[key] = copy.deepcopy(draw.choice(ODD))
    elif kind < 0.75:
        del holder[key]
    elif kind < 0.85:
        other, place = _choose_entry(draw, value)
        if place is not None:
            holder[key] = copy.deepcopy(other[place])
    elif isinstance(holder, dict):
        holder[draw.choice(["x", "", "../up", "model/abc/w", "\x1b[2J", "step", "optimizer", key + "_"])] = holder.pop(
            key
        )
    elif isinstance(holder[key], int) and not isinstance(holder[key], bool):
        holder[key] += draw.choice([-1, 1, 1000, 2**40])
    else:
        holder.insert(key, copy.deepcopy(holder[key]))


def _choose_entry(draw: random.Random, value: Any) -> tuple[Any, Any]:
    holder, key = None, None
    while isinstance(value, dict | list) and value and (key is None or draw.random() > 0.15):
        holder = value
        key = draw.choice(list(value)) if isinstance(value, dict) else draw.randrange(len(value))
        value = value[key]
    return holder, key


_PIECES = [
    b"[" * 2000, b"[" * 200, b'{"a":' * 2000, b"{", b'"', b"9" * 30, b"-", b"NaN", b"\0", b"\xff", b"true", b"1e999",
]  # fmt: skip


def mutate_bytes(draw: random.Random, data: bytes) -> bytes:
    """Return a copy with some bytes changed, removed or inserted."""
    raw = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(len(raw) + 1)
        kind = draw.randrange(3)
        if kind == 0 and place < len(raw):
            raw[place] = draw.randrange(256)
        elif kind == 1:
            del raw[place : place + draw.randint(1, 40)]
        else:
            raw[place:place] = draw.choice(_PIECES)
    return bytes(raw)


# -------------------------------------------------------------------- manifests


def seal_manifest(content: Any, version: int = 3) -> bytes:
    """Return the bytes of a manifest with this content and its correct hash."""
    return json.dumps(
        {"format": "headway checkpoint", "version": version, "sha256": _compute_digest(content), "content": content}
    ).encode()


def manifests(seed: int, count: int, tally: Tally) -> None:
    """Load changed manifests with correct hashes. Each must load completely, or be refused without changing any object."""
    for number, settings in enumerate(RUNS):
        _manifests(seed, range(number, count, len(RUNS)), tally, settings)


def _manifests(seed: int, numbers: range, tally: Tally, settings: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = save_checkpoint(Path(name), **settings)
        content = json.loads((folder / MANIFEST).read_text())["content"]
        run = Run(Path(name), **settings)
        before = run.print()
        if tally.run("unchanged", lambda: _load(run, folder)) != "taken":
            tally.record_fault("unchanged", "is not loaded")
        run = Run(Path(name), **settings)
        for number in numbers:
            draw = random.Random(f"{seed} manifest {number}")
            part = draw.choice(["state"] * 4 + ["about", "tensors", "files", "aliases", "all"])
            if part == "state":
                part = draw.choice([*content["state"], "state"])
            changed = _change_content(draw, content, part)
            (folder / MANIFEST).write_bytes(seal_manifest(changed))
            end = tally.run(number, lambda run=run: _load(run, folder))
            if end == "taken":
                run = Run(Path(name), **settings)
                before = run.print()
            elif run.print() != before:
                tally.record_fault(number, f"{part}: changed objects, and then: {end}")
                run = Run(Path(name), **settings)


def _change_content(draw: random.Random, content: Any, part: str) -> Any:
    """Return a copy of a manifest's content with random changes in the given part."""
    if part in content or part == "all":
        return mutate(draw, content) if part == "all" else _mutate_entry(draw, content, part)
    return {**content, "state": _mutate_entry(draw, content["state"], part)}


def _mutate_entry(draw: random.Random, table: dict[str, Any], part: str) -> dict[str, Any]:
    return {**{name: value for name, value in table.items() if name != part}, **mutate(draw, {part: table[part]})}


def _load(run: Run, folder: Path) -> str:
    run.accelerator.load_state(str(folder))
    return "taken"


# -------------------------------------------------------------------- headers and indexes


def headers(seed: int, count: int, tally: Tally) -> None:
    """Read changed headers of safetensors files and changed indexes of sharded ones. Each must be read, or refused."""
    with tempfile.TemporaryDirectory() as name:
        folder = save_checkpoint(Path(name))
        file = "optimizer-00000.safetensors"
        manifest, right = json.loads((folder / MANIFEST).read_text())["content"], (folder / file).read_bytes()
        plain = Path(name) / "model.safetensors"
        index, pickled = Path(name) / "model.safetensors.index.json", Path(name) / "model.bin"
        weights = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}, "metadata": {"total_size": 8, "c": "a"}}
        for each in "ab":
            entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
            (Path(name) / f"{each}.safetensors").write_bytes(_with_header({each: entry}, b"1234"))
        for number in range(count):
            draw = random.Random(f"{seed} header {number}")
            kind = draw.choice(["shard", "shard", "file", "index", "pickle"])
            if kind == "index":
                text = json.dumps(mutate(draw, weights)).encode()
                index.write_bytes(text if draw.random() < 0.5 else mutate_bytes(draw, text))
                tally.run(number, lambda: _read_weights(index))
                continue
            if kind == "pickle":
                pickled.write_bytes(_make_pickle(draw))
                tally.run(number, lambda: _read_weights(pickled))
                continue
            data = _change_header(draw, right)
            if kind == "file":
                plain.write_bytes(data)
                tally.run(number, lambda: _read_weights(plain))
                continue
            (folder / file).write_bytes(data)
            written = hash_file(folder / file, file)
            fitting = {"bytes": written.num_bytes, "xxh3_128": list(written.digests)}
            content = {**manifest, "files": {**manifest["files"], file: fitting}}
            (folder / MANIFEST).write_bytes(seal_manifest(content))
            tally.run(number, lambda: _read_state(folder))


def _make_pickle(draw: random.Random) -> bytes:
    """Return a `torch.save` file with objects that are not weights, or with changed bytes."""
    odd = [torch.ones(2, 2).to_sparse(), torch.ones(1).expand(10**6), torch.ones(2, device="meta"), torch.ones(3), [1],
           None, torch.ones(2, 2).t(), torch.nn.Parameter(torch.ones(2))]  # fmt: skip
    file = io.BytesIO()
    torch.save({draw.choice(["a", 1, None, ("a",), "\ud800"]): draw.choice(odd)}, file,
               _use_new_zipfile_serialization=draw.random() < 0.7)  # fmt: skip
    return file.getvalue() if draw.random() < 0.5 else mutate_bytes(draw, file.getvalue())


def _change_header(draw: random.Random, data: bytes) -> bytes:
    length = int.from_bytes(data[:8], "little")
    if draw.random() < 0.4:
        return mutate_bytes(draw, data[: 8 + length]) + data[8 + length :]
    return _with_header(mutate(draw, json.loads(data[8 : 8 + length])), data[8 + length :])


def _with_header(header: Any, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def _read_weights(path: Path) -> str:
    for stored in open_checkpoint(path).tensors.values():
        stored.tensor().reshape(-1).clone().view(torch.uint8).sum()
    return "read"


def _read_state(folder: Path) -> str:
    for is_verified in (True, False):
        for tensor in read_state(folder, read_manifest(folder), is_verified)[0].values():
            tensor.clone()
    return "read"


# -------------------------------------------------------------------- configurations and command lines

_MACHINES = [
    Machine("box", "/bin/python", 8, loopback="lo"),
    Machine("gpubox", "/bin/python", 8, "cuda", ("0", "1"), "lo"),
]
_SCALARS = [
    "yes", "no", "~", "-1", "0", "3", "1e400", "9" * 400, "bf16", "!!bool maybe", "2001-01-01", "!!binary x", "&a [*a]",
    "{a: *a}", "'", '"', "[[[]]]", "[" * 3000, "!!python/object:os.system x", "0x7f", "1:30", "\x1b[2J", "|", "? a", "<<",
    "null", "!!set {a}",
]  # fmt: skip


def configurations(seed: int, count: int, tally: Tally) -> None:
    """Read random configuration files. Each must be read, or refused."""
    from headway.core.config.files import read_file_layer

    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "config.yaml"
        for number in range(count):
            draw = random.Random(f"{seed} configuration {number}")
            path.write_bytes(_draw_configuration(draw))
            tally.run(number, lambda: "read" if read_file_layer(str(path), {}) is not None else "")


def _draw_configuration(draw: random.Random) -> bytes:
    if draw.random() < 0.2:
        return json.dumps(mutate(draw, {"num_processes": 2, "cpu": True, "mixed_precision": "bf16"})).encode()
    keys = [*SETTINGS, "x", "<<", "? [a]", "compute_environment", "num_procs"]
    text = "".join(f"{draw.choice(keys)}: {draw.choice(_SCALARS)}\n" for _ in range(draw.randint(0, 5)))
    return text.encode() if draw.random() < 0.7 else mutate_bytes(draw, text.encode())


_FLAGS = [
    "--tensors", "--verify", "--model", "--max_shard_size", "--overwrite", "--config_file", "--force", "--json", "--dry_run",
    "-n", "-m", "-q", "--out", "--png", "--file", "--clear", "--dtype", "--sequence", "--help", "--nope", "--", "-",
]  # fmt: skip
_WORDS = [
    "saved", "odd", "pipe", "zero", "null", "empty", "config.yaml", "train.py", "nowhere", "saved/manifest.json", "pipe/x",
    "n" * 300, "n" * 5000, ".", "out", "default", "show", "update", "import", "0", "-1", "2147483647", "9" * 400, "10GB",
    "1e9", "bf16", "", " ", "\x1b[2J", "\u202e", "\udc80", "a=b", "=", "latest", "null/x",
]  # fmt: skip
_PLACES = ["saved", "odd", "pipe", "zero", "null", "out", "n" * 300, "null/x"]
_TAKES = {"inspect": 1, "merge": 2, "report": 1, "estimate": 1}
_COMMANDS = [
    "launch",
    "config",
    "inspect",
    "inspect",
    "merge",
    "merge",
    "report",
    "estimate",
    "nope",
    "--version",
    "",
]


def command_lines(seed: int, count: int, tally: Tally) -> None:
    """Run random command lines in a folder of odd files.

    Each must succeed, or be refused with exit code 1 or 2 and a message.
    """
    with tempfile.TemporaryDirectory() as name:
        checkpoint = save_checkpoint(Path(name) / "made")
        for number in range(count):
            folder = Path(name) / str(number // 25)
            if not folder.exists():
                _fill_folder(folder, checkpoint)
            draw = random.Random(f"{seed} command line {number}")
            words = [draw.choice(_COMMANDS)]
            if words[0] in _TAKES:
                words += [draw.choice([*_PLACES, draw.choice(_WORDS)]) for _ in range(_TAKES[words[0]])]
            words += [_draw_word(draw) for _ in range(draw.choice([0, 0, 1, 2, 5]))]
            end = tally.run(f"{number} {words!r}"[:300], lambda: _run_command(draw.choice(_MACHINES), folder, words))
            if end not in ("exit None", "exit 0", "exit 1", "exit 2", "done") and "\n" not in end:
                tally.record_fault(number, end)


def _draw_word(draw: random.Random) -> str:
    if draw.random() < 0.15:
        return f"--{draw.choice(list(SETTINGS))}"
    return draw.choice(_FLAGS) if draw.random() < 0.35 else draw.choice(_WORDS)


def _fill_folder(folder: Path, checkpoint: Path) -> None:
    """Create a folder with a valid checkpoint, an odd one, and files of all kinds.

    Symbolic links replace devices, so that no command can remove a device.
    """
    folder.mkdir()
    shutil.copytree(checkpoint, folder / "saved")
    (folder / "odd").mkdir()
    manifest = json.loads((checkpoint / MANIFEST).read_text())["content"]
    changed = {
        name.replace("model/0/0.weight", "model/abc/\x1b[31mw\ud800"): each
        for name, each in manifest["tensors"].items()
    }
    (folder / "odd" / MANIFEST).write_bytes(seal_manifest({**manifest, "tensors": changed, "aliases": {}}))
    for file in manifest["files"]:
        shutil.copy(checkpoint / file, folder / "odd" / file)
    os.mkfifo(folder / "pipe")
    (folder / "zero").symlink_to("/dev/zero")
    (folder / "null").symlink_to("/dev/null")
    (folder / "empty").mkdir()
    (folder / "train.py").write_text("print()\n")
    (folder / "config.yaml").write_text("num_processes: 2\n")


def _run_command(machine: Machine, folder: Path, words: list[str]) -> str:
    patches = [
        patch("headway.launch.machine.inspect_machine", lambda environment: machine),
        patch("headway.launch.run.execute_plan", lambda plan, environment, is_quiet: None),
        patch("headway.common.env.copy_variables", lambda: {"HEADWAY_HOME": str(folder)}),
        contextlib.chdir(folder), contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), "utf-8")),
    ]  # fmt: skip
    stderr = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace")
    with contextlib.ExitStack() as stack, contextlib.redirect_stderr(stderr):
        for each in patches:
            stack.enter_context(each)
        try:
            headway(words)
        except SystemExit as ended:
            stderr.flush()
            if ended.code not in (0, None) and not stderr.buffer.getvalue():
                raise AssertionError("refused without a word") from ended
            raise
    return "done"


# -------------------------------------------------------------------- all of it

KINDS: dict[str, tuple[int, Callable[[int, int, Tally], None]]] = {
    "manifests": (1000, manifests), "headers": (1000, headers), "configurations": (1000, configurations),
    "command_lines": (2000, command_lines),
}  # fmt: skip


def main() -> int:
    """Run the requested number of cases of each kind, and return 0 if all of them ended as allowed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    for kind, (count, _) in KINDS.items():
        parser.add_argument(f"--{kind}", type=int, default=count)
    arguments = vars(parser.parse_args())
    torch.set_num_threads(1)
    logging.getLogger("headway").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    num_faults = 0
    for kind, (_, act) in KINDS.items():
        tally = Tally(kind.replace("_", " "))
        act(arguments["seed"], arguments[kind], tally)
        print(tally, *tally.faults[:20], sep="\n  ", flush=True)
        num_faults += len(tally.faults)
    return int(num_faults > 0)


if __name__ == "__main__":
    sys.exit(main())
