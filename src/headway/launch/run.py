"""Check that the program of a launch can start, and execute a launch plan.

The check does not run the program. To execute the plan, the launcher's process replaces itself with the plan's command,
which is either the program or the launcher's agent.
"""

import importlib.util
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from headway.errors import ConfigError, LaunchError
from headway.launch.order import Program
from headway.launch.plan import LaunchPlan


def execute_plan(plan: LaunchPlan, environment: Mapping[str, str], *, is_quiet: bool = False) -> NoReturn:
    """Replace this process with the plan's command.

    Args:
        plan: Launch to execute.
        environment: Environment variables of the launcher, to which the plan's changes are applied.
        is_quiet: Whether to omit the banner and the notes. If the plan's banner is empty, both are always omitted.
            Default: False.

    Raises:
        LaunchError: If the command cannot be found or started.
    """
    if not is_quiet and plan.banner:
        print(plan.banner, file=sys.stderr)
        for note in plan.notes:
            print(f"headway: {note}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    program = plan.argv[0]
    path: str | None = program
    if os.sep not in program:
        import shutil  # rarely needed

        path = shutil.which(program)
    if path is None:
        raise LaunchError(
            f"{program!r} is not a program on PATH; give its path, or leave --no_python out to run a Python script"
        )
    try:
        os.execve(path, list(plan.argv), plan.make_environment(environment))
    except OSError as error:
        raise LaunchError(f"{path} could not be started: {error.strerror or error}") from error


def check_program(program: Program, *, can_be_other: bool = True) -> None:
    """Raise an error if the script or module does not exist, or if Python cannot run it.

    Args:
        program: Program to check. A program that is neither script nor module is not checked.
        can_be_other: Whether the command could also run a program that is not Python. An error then suggests
            --no_python. Default: True.

    Raises:
        ConfigError: If the script or module does not exist, cannot be read, or cannot be run by Python.
    """
    if program.kind == "script":
        _check_script(program.target, can_be_other)
    elif program.kind == "module":
        _check_module(program.target)


def _check_script(target: str, can_be_other: bool) -> None:
    """Raise an error unless Python can run a path: a script, or a folder or archive that contains a `__main__.py`.

    Args:
        target: Path to check.
        can_be_other: Whether the command could also run a program that is not Python. The advice then mentions it.

    Raises:
        ConfigError: If the path does not exist, cannot be read, or is a folder or archive without a `__main__.py`.
    """
    is_folder = os.path.isdir(target)
    if not is_folder:
        _check_readable(target, can_be_other)
    elif not Path(target, "__main__.py").is_file():
        scripts = _list_scripts(Path(target))
        example = f", such as {Path(target, scripts[0])}" if scripts else ""
        raise ConfigError(
            f"{target!r} is a folder without a __main__.py; give the script in it{example}, or -m to run a module"
        )
    if target.endswith((".zip", ".pyz", ".egg")) and not _has_main(target):
        raise ConfigError(f"{target!r} is not an archive with a __main__.py; give one that `python {target}` runs")


def _check_readable(target: str, can_be_other: bool) -> None:
    """Raise `ConfigError` if a file does not exist or cannot be read. See `_check_script` for the arguments."""
    try:
        if stat.S_ISREG(os.stat(target).st_mode):  # opening a pipe would block for a writer
            with open(target, "rb"):
                pass
    except FileNotFoundError:
        raise ConfigError(
            f"there is no script {target!r} (looked in {Path.cwd()}); {_find_near_names(target, can_be_other)}"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: the path contains a null byte
        shown = target if len(target) <= 80 else f"{target[:60]}... ({len(target)} characters)"
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"the script {shown!r} cannot be read: {reason}; {_suggest_remedy(error)}") from None


def _suggest_remedy(error: Exception) -> str:
    """Return advice on a script that cannot be read."""
    if isinstance(error, PermissionError):
        return "let this user read it (chmod u+r), or start the run as a user who may"
    return "give the path of a Python file"


def _find_near_names(target: str, can_be_other: bool) -> str:
    """Return advice for a script that does not exist: a similar file name, or else other ways to name a program.

    Args:
        target: Path that does not exist.
        can_be_other: Whether the command could also run a program that is not Python.
    """
    from difflib import get_close_matches

    path = Path(target)
    similar_names = get_close_matches(path.name, _list_scripts(path.parent), n=1)
    if similar_names:
        return f"did you mean {path.with_name(similar_names[0])}?"
    return "give its path, or -m to run a module" + (", or --no_python to run another program" if can_be_other else "")


def _list_scripts(folder: Path) -> list[str]:
    """Return the names of a folder's Python files, sorted. Empty if the folder cannot be read."""
    try:
        return sorted(entry.name for entry in folder.iterdir() if entry.suffix == ".py")
    except OSError:
        return []


def _has_main(target: str) -> bool:
    """Whether the file is a zip archive that contains a `__main__.py`."""
    import zipfile  # takes a tenth of a launch, and is rarely needed

    try:
        with zipfile.ZipFile(target) as archive:
            return "__main__.py" in archive.namelist()
    except (OSError, zipfile.BadZipFile):
        return False


def _check_module(target: str) -> None:
    """Raise an error unless `python -m` can find a module of this name.

    Raises:
        ConfigError: If the text is the path of a file or not a name of a module, or its top-level package is not found.
    """
    if os.sep in target or (target.endswith(".py") and os.path.isfile(target)):
        name = target.removesuffix(".py").strip("./").replace(os.sep, ".")
        raise ConfigError(
            f"-m takes the name of a module, and {target!r} is a file's: leave -m out to run the file, or write -m {name}"
        )
    if not all(part.isidentifier() for part in target.split(".")):
        raise ConfigError(f"-m takes the name of a module, such as my_package.train, and {target!r} is not one")
    # Check only the first part, because finding a submodule imports its packages. Python itself reports a missing
    # submodule.
    if not _can_find_module(target.partition(".")[0]):
        raise ConfigError(
            f"there is no module {target!r} (looked in {Path.cwd()} and in this Python's packages); start from the folder that "
            "contains it, or install it, or leave -m out to run a file"
        )


def _can_find_module(name: str) -> bool:
    """Whether a top-level module exists in the current folder or in this Python's packages. It is not imported."""
    with _search_here_first():
        try:
            return importlib.util.find_spec(name) is not None
        except (ImportError, ValueError, AttributeError):
            return False


@contextmanager
def _search_here_first() -> Iterator[None]:
    """Return a context in which the current folder is searched first, as in `python -m`.

    It has no effect if Python runs in safe-path mode.
    """
    kept = list(sys.path)
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.getcwd())
    try:
        yield
    finally:
        sys.path[:] = kept
