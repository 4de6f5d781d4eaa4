"""Test that the program of a launch is checked before any process starts, without running it."""

import os
import zipfile

import pytest

from headway.errors import ConfigError
from headway.launch.order import Program
from headway.launch.run import check_program

RUNS = "raise AssertionError('the launcher has run it')\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Working directory with modules and scripts that must not run."""
    for name in (
        "train.py",
        "pkg/__init__.py",
        "pkg/sub/__init__.py",
        "pkg/a.py",
        "space/deep/b.py",
        "app/__main__.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(RUNS)
    (tmp_path / "lazy").mkdir()
    (tmp_path / "lazy/__init__.py").write_text("__path__.append('/elsewhere')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        "train",
        "pkg",
        "pkg.a",
        "pkg.sub",
        "space.deep.b",
        "app",
        "lazy.may_be_elsewhere",
        "json.tool",
        "pkg.left_to_python",
    ],
)
def test_existing_module_is_not_run(folder, name):
    check_program(Program(name, (), "module"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("train.py", "leave -m out to run the file, or write -m train$"),
        ("./pkg/a.py", "leave -m out to run the file, or write -m pkg.a$"),
        ("nosuch", "there is no module 'nosuch' .looked in .*start from the folder that contains it"),
        ("train_x.y", "there is no module 'train_x.y'"),
        ("two words", "'two words' is not one"),
    ],
)
def test_missing_module_is_refused(folder, name, message):
    with pytest.raises(ConfigError, match=message):
        check_program(Program(name, (), "module"))


def test_folders_and_archives_need_a_main_module(folder):
    check_program(Program("app"))
    with pytest.raises(
        ConfigError, match=r"'pkg' is a folder without a __main__.py; give the script in it, such as pkg/__init__"
    ):
        check_program(Program("pkg"))
    with zipfile.ZipFile("app.pyz", "w") as archive:
        archive.writestr("__main__.py", RUNS)
    check_program(Program("app.pyz"))
    with zipfile.ZipFile("empty.zip", "w"):
        pass
    with pytest.raises(ConfigError, match=r"is not an archive with a __main__.py"):
        check_program(Program("empty.zip"))


def test_unreadable_script_is_refused(folder):
    os.chmod("train.py", 0)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        with pytest.raises(ConfigError, match=r"'train.py' cannot be read: Permission denied; let this user read it"):
            check_program(Program("train.py"))
    finally:
        if is_root:
            os.seteuid(0)


def test_program_is_left_to_the_path(folder):
    check_program(Program("sh", ("-c", "true"), "program"))


def test_pipe_is_left_to_python(folder):
    os.mkfifo(folder / "pipe")
    check_program(Program("pipe"))  # opening it would wait for a writer
