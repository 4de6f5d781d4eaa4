"""Builds the stand-ins for CUDA's libraries into an environment with torch's CUDA build: `PYTHON tests/simulated_cuda/build.py`.

Run with that environment's Python. g++ and nm are needed; every library that torch links is made, with the functions that torch's
own libraries ask it for, and put where they look for it. Nothing is built twice from the same sources.
"""

import hashlib
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent
SITE = Path(sysconfig.get_paths()["purelib"])
TARGET = SITE / "nvidia" / "cu13" / "lib"
INCLUDE = SITE / "nvidia" / "cu13" / "include"

RUNTIME = [
    "devices.cpp",
    "counters.cpp",
    "streams.cpp",
    "clock.cpp",
    "graphs.cpp",
    "memory.cpp",
    "kernels.cpp",
    "driver.cpp",
]
"""In libcudart, beside which the others are small."""
OWN = {"libcuda.so.1": ["libcuda.cpp"], "libnvidia-ml.so.1": ["libnvml.cpp"], "libnccl.so.2": ["libnccl.cpp"]}
VALUES = ["values.cpp", "special.cpp", "attention.cpp"]
BY_PREFIX = {
    "cudnn[A-Z]": "libcudnn.so.9", "nccl[A-Z]": "libnccl.so.2", "cusparseLt[A-Z]": "libcusparseLt.so.0",
    "cuFile[A-Z]": "libcufile.so.0", "nvshmem": "libnvshmem_host.so.3", "cu[A-Z]": "libcuda.so.1",
}  # fmt: skip
"""Of the names whose version is not that of a library."""


def asked() -> dict[str, dict[str, str]]:
    """By library: the functions that torch's libraries need of it, and the version of each ("" for none)."""
    found: dict[str, dict[str, str]] = {}
    for path in sorted((SITE / "torch" / "lib").glob("*.so")):
        listed = subprocess.run(
            ["nm", "-D", "--undefined-only", path], capture_output=True, text=True, check=True
        ).stdout
        for name, version in re.findall(r" U (\w+)@?@?(\S*)", listed):
            if version.startswith("lib"):
                found.setdefault(version, {})[name] = version
            elif library := next((each for prefix, each in BY_PREFIX.items() if re.match(prefix, name)), None):
                found.setdefault(library, {})[name] = version
    return found


def needed() -> set[str]:
    """Libraries of CUDA that torch's own name."""
    found: set[str] = set()
    for path in (SITE / "torch" / "lib").glob("*.so"):
        listed = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
        found.update(re.findall(r"NEEDED.*\[(lib(?:cu|nv|nccl)[^\]]*)\]", listed))
    return found


def defined(path: Path) -> set[str]:
    listed = subprocess.run(["nm", "--defined-only", path], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r" [TW] (\w+)$", listed, re.MULTILINE))


def compiled(source: Path, *flags: str | Path) -> Path:
    to = TARGET / "objects" / (source.stem + ".o")
    subprocess.run(
        ["g++", "-w", "-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-c", source, "-o", to, *flags], check=True
    )
    return to


def linked(name: str, objects: list[Path], functions: dict[str, str], *flags: str | Path) -> None:
    """A library with these objects, and functions that return 0 for all it is asked for beside them."""
    have = set().union(*map(defined, objects)) if objects else set()
    stubs = TARGET / "objects" / (name + ".c")
    stubs.write_text("".join(f"long {each}(void) {{ return 0; }}\n" for each in sorted(set(functions) - have)))
    versions = TARGET / "objects" / (name + ".map")
    version = next((each for each in functions.values() if each), "")
    versions.write_text(f"{version} {{ global: *; }};\n")
    script = [f"-Wl,--version-script={versions}"] if version else []
    # gcc for the stubs: a name may be one that C++ knows otherwise.
    subprocess.run(["gcc", "-w", "-fPIC", "-c", stubs, "-o", stubs.with_suffix(".o")], check=True)
    (TARGET / name).unlink(missing_ok=True)  # the vendor's, or the last one
    subprocess.run(
        [
            "g++",
            "-shared",
            "-o",
            TARGET / name,
            f"-Wl,-soname,{name}",
            *objects,
            stubs.with_suffix(".o"),
            *script,
            *flags,
        ],
        check=True,
    )


def build_libraries() -> None:
    (TARGET / "objects").mkdir(parents=True, exist_ok=True)
    functions = asked()
    folder, runtime = HERE / "libraries", "libcudart.so.13"
    linked(runtime, [compiled(folder / each, "-I", INCLUDE) for each in RUNTIME], functions.pop(runtime), "-lpthread")
    own = compiled(folder / "libraries.cpp")
    exported = defined(own)
    for name in sorted(needed() | set(functions) | set(OWN) - {runtime}):
        if name == runtime:
            continue
        wanted = functions.get(name, {})
        objects = [compiled(folder / each, "-I", INCLUDE) for each in OWN.get(name, [])]
        if exported & set(wanted):
            objects.append(own)
        beside = [TARGET / runtime, "-Wl,-rpath,$ORIGIN"] if name in OWN and name != "libnvidia-ml.so.1" else []
        linked(name, objects, wanted, *beside)


def build_values() -> None:
    """The library that computes what kernels would have; against torch's own headers."""
    torch = SITE / "torch"
    flags = ["-I", torch / "include", "-I", torch / "include/torch/csrc/api/include", "-I", INCLUDE]
    objects = [compiled(HERE / "values" / each, *flags) for each in VALUES]
    libraries = ["-ltorch_cpu", "-ltorch_cuda", "-lc10", "-lc10_cuda"]
    subprocess.run(
        ["g++", "-shared", "-o", TARGET / "libsimulated_values.so", *objects, "-L", torch / "lib", *libraries,
         TARGET / "libcudart.so.13", f"-Wl,-rpath,{torch / 'lib'}"], check=True,
    )  # fmt: skip


def stamp(folder: str) -> tuple[Path, str]:
    sources = sorted((HERE / folder).glob("*.*")) + [Path(__file__)]
    version = (SITE / "torch" / "version.py").read_bytes()
    return TARGET / f".{folder}", hashlib.sha256(b"".join(each.read_bytes() for each in sources) + version).hexdigest()


def install() -> None:
    """torch loads the values by itself in every process of the environment, and NVML is found before that."""
    about = SITE / "simulated_cuda-0.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: simulated-cuda\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[torch.backends]\nsimulated_cuda = simulated_cuda:_load\n")
    nvml = TARGET / "libnvidia-ml.so.1"
    load = f"import ctypes; ctypes.CDLL({str(nvml)!r}, mode=ctypes.RTLD_GLOBAL)"
    (SITE / "simulated_cuda.pth").write_text(f"{HERE / 'module'}\n{load}\n")


def main() -> None:
    for folder, build in (("libraries", build_libraries), ("values", build_values)):
        if not (HERE / folder).exists():
            continue
        at, current = stamp(folder)
        if not at.exists() or at.read_text() != current:
            print(f"building the {folder} of tests/simulated_cuda", file=sys.stderr)
            build()
            at.write_text(current)
    install()


if __name__ == "__main__":
    main()
