"""Access to the project's files and their syntax trees, for the tests of the code rules."""

import ast
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "headway"
_CODE = ("src", "scripts", "examples", "benchmarks", "tests")


@cache
def list_project_files() -> tuple[Path, ...]:
    """Return all files that are tracked by git, or untracked but not ignored."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"],
                            capture_output=True, text=True, check=True).stdout.splitlines()  # fmt: skip
    return tuple(path for path in (ROOT / name for name in listed) if path.is_file())


@cache
def list_modules(*folders: str) -> tuple[Path, ...]:
    """Return the Python files in the given top-level folders, or in all of them if none is given."""
    return tuple(
        file for file in list_project_files()
        if file.suffix == ".py" and file.relative_to(ROOT).parts[0] in (folders or _CODE)
    )  # fmt: skip


@cache
def parse_module(file: Path) -> ast.Module:
    """Return the file's syntax tree."""
    return ast.parse(file.read_text(), str(file))


@cache
def list_nodes(file: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of the file's syntax tree. Cached, because many tests iterate over them."""
    return tuple(ast.walk(parse_module(file)))


def get_relative_path(file: Path) -> str:
    """Return the path relative to the repository, with forward slashes."""
    return file.relative_to(ROOT).as_posix()
