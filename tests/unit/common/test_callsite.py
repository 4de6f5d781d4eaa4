"""Test how the innermost line of user code is found among library and Headway frames."""

import os
import subprocess
import sys
import sysconfig
from itertools import islice
from pathlib import Path

import pytest

from headway.common import callsite
from headway.common.callsite import (
    Frame,
    find_call_site,
    find_user_frame,
    find_user_line,
    is_headway_file,
    is_user_file,
    walk_stack,
)

LIBRARY = sysconfig.get_path("purelib") + "/lib/code.py"


def call_from_file(file, function):
    """Return the result of `function`, called from code that is compiled as if it were in `file`."""
    space = {"function": function}
    exec(compile("\n\nfound = function()\n", file, "exec"), space)
    return space["found"]


def test_files_of_users_and_of_headway_are_recognized():
    assert is_user_file(__file__)
    assert not any(map(is_user_file, [callsite.__file__, LIBRARY, "<frozen runpy>", sysconfig.__file__]))
    assert is_headway_file(callsite.__file__)
    assert not is_headway_file(__file__)


@pytest.mark.parametrize(
    "file",
    [
        "/usr/lib/python3/dist-packages/numpy/core.py",
        "/srv/demo/.local/lib/python3.11/site-packages/torch/autograd/graph.py",
        "/opt/base_environment/lib/python3.11/site-packages/torch/autograd/graph.py",
    ],
)
def test_packages_outside_the_current_environment_are_not_the_users(file):
    """`pip install --user`, Debian's packages, and the environment below one with --system-site-packages."""
    assert not is_user_file(file)


@pytest.mark.parametrize("has_metadata", [True, False], ids=["pip install --target", "clone"])
def test_torch_in_a_folder_of_its_own_is_not_the_users(tmp_path, has_metadata):
    (tmp_path / "own_folder/torch").mkdir(parents=True)
    (tmp_path / "own_folder/torch/__init__.py").touch()
    if has_metadata:
        for package, record in (
            ("torch-2.13.0", "torch/nn.py,,\n../../bin/torchrun,,\n"),
            ("networkx-3.6", "networkx/graph.py,sha256=a,1\nnetworkx-3.6.dist-info/RECORD,,\n"),
            ("six-1.17.0", "six.py,,\n"),
        ):
            (tmp_path / f"own_folder/{package}.dist-info").mkdir()
            (tmp_path / f"own_folder/{package}.dist-info/RECORD").write_text(record)
    code = (
        "import sys; sys.path.insert(0, 'own_folder'); from headway.common.callsite import is_user_file\n"
        "files = '/torch/nn.py /networkx/graph.py /six.py _of_mine/train.py /train.py /my_package/loop.py'.split()\n"
        "print(*(int(is_user_file(sys.argv[1] + each)) for each in files))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "own_folder")]
    environment = {**os.environ, "PYTHONPATH": str(Path(callsite.__file__).parents[2])}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    # `pip install --target .` puts the packages beside the user's scripts, which stay the user's code.
    assert ran.stdout.strip() == ("0 0 0 1 1 1" if has_metadata else "0 1 1 1 1 1"), ran.stderr


def test_call_site_is_the_line_of_the_call():
    here = sys._getframe()
    assert find_call_site() == f"{__file__}:{here.f_lineno}"
    assert find_user_frame() is here


def test_library_frames_in_between_are_skipped():
    line = call_from_file.__code__.co_firstlineno + 3  # the line with `exec`
    assert call_from_file(LIBRARY, find_call_site) == f"{__file__}:{line}"
    assert call_from_file("/u/train.py", find_call_site) == "/u/train.py:3"
    assert (
        call_from_file("/u/train.py", lambda: call_from_file(callsite.__file__, find_user_frame)).f_code.co_filename
        == __file__
    )


def test_without_user_frames_the_innermost_other_frame_is_used(monkeypatch):
    monkeypatch.setattr(callsite, "is_user_file", lambda file: False)
    assert find_user_frame() is None
    assert call_from_file(LIBRARY, find_call_site) == f"{LIBRARY}:3"
    assert call_from_file(callsite.__file__, find_call_site).startswith(f"{__file__}:")


def test_stack_is_walked_from_the_inside_out():
    def inner():
        return [Frame.from_frame(each).function for each in islice(walk_stack(), 2)]

    assert inner() == ["inner", "test_stack_is_walked_from_the_inside_out"]
    assert next(walk_stack(sys._getframe(1))) is sys._getframe(1)


def test_users_line_is_found_in_a_traceback(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ZeroDivisionError) as exc_info:
        call_from_file(
            LIBRARY, lambda: call_from_file(str(tmp_path / "train.py"), lambda: call_from_file(LIBRARY, lambda: 1 / 0))
        )
    assert find_user_line(exc_info.tb).startswith(f"{__file__}:")  # the lambda that divides
    last = exc_info.tb
    while not last.tb_frame.f_code.co_filename.endswith("train.py"):
        last = last.tb_next
    last.tb_next = None
    assert find_user_line(last) == "train.py:3"
    assert find_user_line(None) == ""


def test_code_without_a_file_is_the_users_unless_generated():
    assert all(map(is_user_file, ["<unseen>", "<stdin>", "<ipython-input-3-0a1b>"]))
    assert not any(map(is_user_file, ["<string>", "<eval_with_key>.4", "<frozen importlib._bootstrap>"]))


def test_frame_is_formatted_if_the_current_folder_is_gone(tmp_path, monkeypatch):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert str(Frame(str(folder / "train.py"), 3, "main")) == "train.py:3 in main"
    folder.rmdir()
    assert str(Frame("/scripts/train.py", 3, "main")) == "/scripts/train.py:3 in main"
