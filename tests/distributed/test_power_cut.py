"""Every state that a power cut during a save could leave on disk loads either the old or the new checkpoint.

strace records the calls of a real save. The disk is modeled as inodes. Of a file, data that was not synced may be lost.
Of a folder, any number of its latest changes since its last sync may be lost, independently for each folder.
"""

import itertools
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from headway.core.checkpoint import folders
from headway.core.checkpoint.loading.files import verify_checkpoint
from headway.errors import CheckpointError
from tests.distributed.test_kill_sweep import _find_skip_reason

SAVE = """
import os, sys
from pathlib import Path
from tests.distributed.killed_saves import VARIANTS, save
root, variant = Path(sys.argv[1]), VARIANTS[sys.argv[2]]
save(root, 1, {**variant, "is_blocking": True})
os.mkdir(root.parent / "before")   # marks the trace and holds a copy of the tree
import shutil
shutil.copytree(root, root.parent / "before" / "root")
os.mkdir(root.parent / "begin")
save(root, 2, variant)
os.mkdir(root.parent / "end")
"""
CALL = re.compile(r"^(?:\d+\s+)?(\w+)\((.*)\)\s+= (-?\d+)")
RESUMED = re.compile(r"^\d+ +<\.\.\. \w+ resumed>(.*)$")
QUOTED = re.compile(r'"([^"]*)"')
AT = re.compile(r"<([^>]*)>")


@dataclass
class Inode:
    """A file with its final content, or a folder with the changes of its entries in order."""

    is_folder: bool
    content: bytes = b""
    length: int = 0
    synced: int = 0
    changes: list = field(default_factory=list)


class Disk:
    def __init__(self):
        self.nodes = [Inode(True)]
        self.now = {0: {}}

    def make(self, is_folder):
        self.nodes.append(Inode(is_folder))
        if is_folder:
            self.now[len(self.nodes) - 1] = {}
        return len(self.nodes) - 1

    def find(self, parts):
        number = 0
        for part in parts:
            number = self.now[number][part]
        return number

    def change(self, folder, *change):
        self.nodes[folder].changes.append(change)
        apply_change(self.now[folder], change)


def apply_change(entries, change):
    kind, *names = change
    if kind == "add":
        entries[names[0]] = names[1]
    elif kind == "drop":
        del entries[names[0]]
    elif kind == "move":
        entries[names[1]] = entries.pop(names[0])
    else:
        entries[names[0]], entries[names[1]] = entries[names[1]], entries[names[0]]


def load_tree(disk, path, number):
    for child in sorted(path.iterdir()):
        made = disk.make(child.is_dir())
        disk.change(number, "add", child.name, made)
        if child.is_dir():
            load_tree(disk, child, made)
        else:
            node = disk.nodes[made]
            node.content = child.read_bytes()
            node.length = node.synced = len(node.content)
    disk.nodes[number].synced = len(disk.nodes[number].changes)


def join_lines(trace):
    """Yield the trace with each call in one line. strace splits a call that another thread's call interrupts."""
    begun = {}
    for line in trace.read_text().splitlines():
        thread = line.split(" ", 1)[0]
        if line.endswith(" <unfinished ...>"):
            begun[thread] = line.removesuffix(" <unfinished ...>")
        elif found := RESUMED.match(line):
            yield begun.pop(thread) + found[1]
        else:
            yield line


def parse_calls(trace, root):
    """Yield (call, text, paths as parts relative to root, result) for the calls between the two marks."""
    is_on = False
    for line in join_lines(trace):
        if '/begin"' in line:
            is_on = True
        elif '/end"' in line:
            return
        found = CALL.match(line)
        if not (is_on and found) or int(found[3]) < 0:
            continue
        call, text = found[1], found[2]
        names = QUOTED.findall(text) if call not in ("write", "pwrite64", "fsync") else AT.findall(text)[:1]
        if call in ("unlinkat", "openat", "mkdirat") and names and not names[0].startswith("/"):
            names = [f"{AT.findall(text)[0]}/{names[0]}"]
        paths = [
            Path(name).relative_to(root).parts for name in names if name == str(root) or name.startswith(f"{root}/")
        ]
        if paths:
            yield call, text, paths, int(found[3])


def replay_call(disk, call, text, paths, result):
    parts = paths[0]
    if call == "openat":
        if "O_CREAT" in text and parts[-1] not in disk.now[disk.find(parts[:-1])]:
            disk.change(disk.find(parts[:-1]), "add", parts[-1], disk.make(False))
        elif "O_TRUNC" in text:
            disk.nodes[disk.find(parts)].length = 0
    elif call == "mkdir":
        disk.change(disk.find(parts[:-1]), "add", parts[-1], disk.make(True))
    elif call == "write":
        disk.nodes[disk.find(parts)].length += result
    elif call == "pwrite64":
        node = disk.nodes[disk.find(parts)]
        node.length = max(node.length, int(text.rsplit(",", 1)[1]) + result)
    elif call == "fsync":
        node = disk.nodes[disk.find(parts)]
        node.synced = len(node.changes) if node.is_folder else node.length
    elif call in ("unlink", "unlinkat", "rmdir"):
        disk.change(disk.find(parts[:-1]), "drop", parts[-1])
    elif call in ("rename", "renameat2"):
        assert parts[:-1] == paths[1][:-1]
        kind = "swap" if "RENAME_EXCHANGE" in text else "move"
        disk.change(disk.find(parts[:-1]), kind, parts[-1], paths[1][-1])
    else:
        raise AssertionError(call)


def list_states(disk):
    """Yield (folder entries, whether unsynced file data is lost) for each state that a power cut may leave now."""
    changed = [n for n, node in enumerate(disk.nodes) if node.is_folder]
    choices = [range(disk.nodes[n].synced, len(disk.nodes[n].changes) + 1) for n in changed]
    for lengths in itertools.product(*choices):
        entries = {}
        for number, length in zip(changed, lengths):
            entries[number] = {}
            for change in disk.nodes[number].changes[:length]:
                apply_change(entries[number], change)
        for is_lost in (True, False):
            yield entries, is_lost


def write_tree(disk, entries, is_lost, number, path):
    path.mkdir()
    for name, child in entries[number].items():
        node = disk.nodes[child]
        if node.is_folder:
            write_tree(disk, entries, is_lost, child, path / name)
        else:
            (path / name).write_bytes(node.content[: node.synced if is_lost else node.length])


def describe_tree(disk, entries, is_lost, number=0):
    return tuple(sorted(
        (name, describe_tree(disk, entries, is_lost, child) if disk.nodes[child].is_folder
         else (child, disk.nodes[child].synced if is_lost else disk.nodes[child].length))
        for name, child in entries[number].items()
    ))  # fmt: skip


def set_contents(disk, root):
    """Set each file's final content. Files that exist at the end were written once, from their start."""
    for path in root.rglob("*"):
        if path.is_file():
            node = disk.nodes[disk.find(path.relative_to(root).parts)]
            node.content = path.read_bytes()


@pytest.mark.skipif(bool(_find_skip_reason()), reason=_find_skip_reason())
@pytest.mark.parametrize("variant", ["blocking", "behind", "exchange", "threads"])
def test_every_state_after_a_power_cut_loads_a_checkpoint(variant, tmp_path):
    root, trace = tmp_path / "root", tmp_path / "trace"
    root.mkdir()
    result = subprocess.run(
        ["strace", "-f", "-y", "-o", str(trace), "-e",
         "trace=openat,write,pwrite64,fsync,rename,renameat2,unlink,unlinkat,rmdir,mkdir",
         sys.executable, "-c", SAVE, str(root), variant], capture_output=True, text=True, timeout=200)  # fmt: skip
    assert result.returncode == 0, result.stderr
    calls = list(parse_calls(trace, root))
    assert len(calls) > 25
    last = Disk()
    load_tree(last, tmp_path / "before" / "root", 0)
    for step in calls:
        replay_call(last, *step)
    set_contents(last, root)
    disk, seen, values = Disk(), set(), []
    load_tree(disk, tmp_path / "before" / "root", 0)
    for step in calls:
        replay_call(disk, *step)
        for number, node in enumerate(disk.nodes):
            node.content = node.content or last.nodes[number].content
        for entries, is_lost in list_states(disk):
            key = describe_tree(disk, entries, is_lost)
            if key not in seen:
                seen.add(key)
                values.append(load_value(disk, entries, is_lost, tmp_path / "cut"))
    print(f"{variant}: {len(seen)} states, {values.count(1)} old, {values.count(2)} new")
    assert set(values) == {1, 2}


def load_value(disk, entries, is_lost, path):
    shutil.rmtree(path, ignore_errors=True)
    write_tree(disk, entries, is_lost, 0, path)
    for folder in folders.list_committed(path):
        try:
            return verify_checkpoint(folder).about["value"]
        except CheckpointError:
            continue
    raise AssertionError(f"no checkpoint loads from {sorted(str(p.relative_to(path)) for p in path.rglob('*'))}")
