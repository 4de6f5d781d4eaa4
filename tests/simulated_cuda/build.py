"""Build replacements of CUDA's libraries for an environment with torch's CUDA build: `PYTHON tests/simulated_cuda/build.py`.

Run this with the Python of that environment. It needs g++ and nm. Each CUDA library that torch links to is replaced by
one with all functions that torch imports from it, in the folder where torch looks for it. Libraries are rebuilt only if
their sources or torch's version change.
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
"""Sources of libcudart, the largest of the libraries."""
OWN = {"libcuda.so.1": ["libcuda.cpp"], "libnvidia-ml.so.1": ["libnvml.cpp"], "libnccl.so.2": ["libnccl.cpp"]}
VALUES = ["values.cpp", "special.cpp", "attention.cpp"]
BY_PREFIX = {
    "cudnn[A-Z]": "libcudnn.so.9", "nccl[A-Z]": "libnccl.so.2", "cusparseLt[A-Z]": "libcusparseLt.so.0",
    "cuFile[A-Z]": "libcufile.so.0", "nvshmem": "libnvshmem_host.so.3", "cu[A-Z]": "libcuda.so.1",
}  # fmt: skip
"""{pattern of function names: library}, for imported functions whose symbol version does not name the library."""


def list_imported_functions() -> dict[str, dict[str, str]]:
    """Return {library: {function: symbol version}} for all functions that torch's libraries import. The version can be empty."""
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


def list_linked_libraries() -> set[str]:
    """Return the names of CUDA's libraries that torch's libraries link to."""
    found: set[str] = set()
    for path in (SITE / "torch" / "lib").glob("*.so"):
        listed = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
        found.update(re.findall(r"NEEDED.*\[(lib(?:cu|nv|nccl)[^\]]*)\]", listed))
    return found


def list_defined_functions(path: Path) -> set[str]:
    listed = subprocess.run(["nm", "--defined-only", path], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r" [TW] (\w+)$", listed, re.MULTILINE))


def compile_source(source: Path, *flags: str | Path) -> Path:
    to = TARGET / "objects" / (source.stem + ".o")
    subprocess.run(
        ["g++", "-w", "-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-c", source, "-o", to, *flags], check=True
    )
    return to


def link_library(name: str, objects: list[Path], functions: dict[str, str], *flags: str | Path) -> None:
    """Link a library from these objects, plus stubs that return 0 for all other functions that torch imports from it."""
    have = set().union(*map(list_defined_functions, objects)) if objects else set()
    stubs = TARGET / "objects" / (name + ".c")
    stubs.write_text("".join(f"long {each}(void) {{ return 0; }}\n" for each in sorted(set(functions) - have)))
    versions = TARGET / "objects" / (name + ".map")
    version = next((each for each in functions.values() if each), "")
    versions.write_text(f"{version} {{ global: *; }};\n")
    script = [f"-Wl,--version-script={versions}"] if version else []
    # The stubs are C, because some names have another declaration in C++.
    subprocess.run(["gcc", "-w", "-fPIC", "-c", stubs, "-o", stubs.with_suffix(".o")], check=True)
    (TARGET / name).unlink(missing_ok=True)  # the vendor's library, or an earlier build
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
    functions = list_imported_functions()
    folder, runtime = HERE / "libraries", "libcudart.so.13"
    link_library(
        runtime, [compile_source(folder / each, "-I", INCLUDE) for each in RUNTIME], functions.pop(runtime), "-lpthread"
    )
    own = compile_source(folder / "libraries.cpp")
    exported = list_defined_functions(own)
    for name in sorted(list_linked_libraries() | set(functions) | set(OWN) - {runtime}):
        if name == runtime:
            continue
        expected = functions.get(name, {})
        objects = [compile_source(folder / each, "-I", INCLUDE) for each in OWN.get(name, [])]
        if exported & set(expected):
            objects.append(own)
        beside = [TARGET / runtime, "-Wl,-rpath,$ORIGIN"] if name in OWN and name != "libnvidia-ml.so.1" else []
        link_library(name, objects, expected, *beside)


def build_values() -> None:
    """Build the library that computes the values of kernels on the CPU, against torch's headers."""
    torch = SITE / "torch"
    flags = ["-I", torch / "include", "-I", torch / "include/torch/csrc/api/include", "-I", INCLUDE]
    objects = [compile_source(HERE / "values" / each, *flags) for each in VALUES]
    libraries = ["-ltorch_cpu", "-ltorch_cuda", "-lc10", "-lc10_cuda"]
    subprocess.run(
        ["g++", "-shared", "-o", TARGET / "libsimulated_values.so", *objects, "-L", torch / "lib", *libraries,
         TARGET / "libcudart.so.13", f"-Wl,-rpath,{torch / 'lib'}"], check=True,
    )  # fmt: skip


def compute_stamp(folder: str) -> tuple[Path, str]:
    sources = sorted((HERE / folder).glob("*.*")) + [Path(__file__)]
    version = (SITE / "torch" / "version.py").read_bytes()
    return TARGET / f".{folder}", hashlib.sha256(b"".join(each.read_bytes() for each in sources) + version).hexdigest()


def install() -> None:
    """Register the libraries in the environment: torch loads the values in every process, and NVML is found before that."""
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
        at, current = compute_stamp(folder)
        if not at.exists() or at.read_text() != current:
            print(f"building the {folder} of tests/simulated_cuda", file=sys.stderr)
            build()
            at.write_text(current)
    install()


if __name__ == "__main__":
    main()
