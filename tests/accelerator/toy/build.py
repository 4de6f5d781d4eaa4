"""Build the toy accelerator with the machine's C++ compiler, once per version of torch and of its sources."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import torch

_HERE = Path(__file__).parent
_LIBRARIES = {"device": ("device.cpp", "operators.cpp"), "group": ("group.cpp",)}


def find_missing_tool() -> str | None:
    """Return what is missing to build the toy accelerator on this machine, or None if it can be built."""
    if find_compiler_path() is None:
        return "no C++ compiler (apt-get install g++)"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "Python's headers are not installed (apt-get install python3-dev)"
    return None


def build() -> dict[str, Path]:
    """Return the paths of the libraries "device" and "group", and compile them on first use.

    Compiling takes about 20 seconds on one core. The libraries stay in the system's temporary folder.
    """
    folder = get_build_folder()
    done = {"device": folder / "libtoy.so", "group": folder / "toy_group.so"}
    if all(path.exists() for path in done.values()):
        return done
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    with open(folder.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ranks and test workers may build at the same time
        if not all(path.exists() for path in done.values()):
            with tempfile.TemporaryDirectory(dir=folder.parent) as name:
                _compile(Path(name))
                folder.mkdir(exist_ok=True)
                for path in done.values():
                    os.replace(Path(name) / path.name, path)
    return done


def find_compiler_path() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def get_build_folder() -> Path:
    text = b"".join(path.read_bytes() for path in sorted(_HERE.glob("*.[ch]*")))
    key = hashlib.sha256(text + torch.__version__.encode() + sysconfig.get_path("include").encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"headway-toy-{os.getuid()}" / key


def _compile(folder: Path) -> None:
    compiler, root = find_compiler_path(), Path(torch.__file__).parent
    assert compiler is not None, find_missing_tool()
    includes = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_path("include")]
    flags = ["-std=c++20", "-O0", "-fPIC", "-fvisibility=hidden", "-w", "-DTORCH_EXTENSION_NAME=toy_group"]
    flags += [f"-I{path}" for path in includes]
    running = [
        subprocess.Popen([compiler, *flags, "-c", str(_HERE / source), "-o", str(folder / f"{source}.o")])
        for sources in _LIBRARIES.values()
        for source in sources
    ]
    if any(code != 0 for code in [process.wait() for process in running]):
        raise RuntimeError("the toy accelerator does not compile; see the compiler's output above")
    for name, library in (("device", "libtoy.so"), ("group", "toy_group.so")):
        objects = [str(folder / f"{source}.o") for source in _LIBRARIES[name]]
        linked = ["-ltorch_cpu", "-lc10", *(["-ltorch_python"] if name == "group" else [])]
        subprocess.run(
            [compiler, "-shared", *objects, "-o", str(folder / library), f"-L{root / 'lib'}", *linked], check=True
        )
