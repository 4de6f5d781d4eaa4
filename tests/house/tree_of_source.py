"""What the house tests look at: the project's files and their parsed modules."""

import ast
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "headway"
_CODE = ("src", "scripts", "examples", "benchmarks", "tests")


@cache
def project_files() -> tuple[Path, ...]:
    """Every file that is, or would be, in a commit."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"],
                            capture_output=True, text=True, check=True).stdout.splitlines()  # fmt: skip
    return tuple(path for path in (ROOT / name for name in listed) if path.is_file())


@cache
def modules(*folders: str) -> tuple[Path, ...]:
    """The Python files under the given top folders; none given: all of them."""
    return tuple(
        file for file in project_files()
        if file.suffix == ".py" and file.relative_to(ROOT).parts[0] in (folders or _CODE)
    )  # fmt: skip


@cache
def parsed(file: Path) -> ast.Module:
    """The file's syntax tree."""
    return ast.parse(file.read_text(), str(file))


@cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    """All of its nodes, for the many tests that look at each of them."""
    return tuple(ast.walk(parsed(file)))


def shown(file: Path) -> str:
    """The path as a reader of the project knows it."""
    return file.relative_to(ROOT).as_posix()
