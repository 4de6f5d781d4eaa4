"""Builds the source archive and from it the wheel, into dist/, and checks both in an empty environment.

`python scripts/release.py [--url URL]`: with the URL of the repository, which a checkout does not know, README's links are absolute
and the metadata names the project's pages. What is built is what git tracks. The packages that Headway needs are lent from the
environment that runs this.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)")
_EXTRAS = {"cuda", "trackers", "plots", "deepspeed", "s3"}  # that pages name
_BACKEND = "import sys, setuptools.build_meta as backend; getattr(backend, sys.argv[1])(sys.argv[2])"
_TRAINS = """
import torch, headway
assert "{venv}" in headway.__file__, headway.__file__
accelerator = headway.Accelerator(cpu=True)
model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.ones(4, 2)).mean())
optimizer.step()
print(headway.__version__)
"""


def version() -> str:
    """The one place that says it, read without an import."""
    return re.findall(r'__version__ = "(.+)"', (ROOT / "src/headway/version.py").read_text())[0]


def with_absolute_links(text: str, url: str) -> str:
    """A page whose links to files of the repository lead there, at this version."""
    kinds = {"": "blob", "!": "raw"}
    return _LINK.sub(lambda at: f"{at[1]}[{at[2]}]({url}/{kinds[at[1]]}/v{version()}/{at[3]})", text)


def build(target: Path, url: str | None) -> tuple[Path, Path]:
    """The wheel and the source archive in `target`."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
        for name in filter(None, names.split("\0")):
            if (ROOT / name).exists():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, tree / name)
        if url is not None:
            readme, project = tree / "README.md", tree / "pyproject.toml"
            readme.write_text(with_absolute_links(readme.read_text(), url))
            pages = f'[project.urls]\nRepository = "{url}"\nIssues = "{url}/issues"\nChangelog = "{url}/blob/main/CHANGELOG.md"\n'
            project.write_text(f"{project.read_text()}\n{pages}")
        _run_backend("build_sdist", tree, target)
        (archive,) = target.glob("*.tar.gz")
        with tarfile.open(archive) as file:
            file.extractall(folder, filter="data")
        _run_backend("build_wheel", Path(folder) / archive.name.removesuffix(".tar.gz"), target)
    (wheel,) = target.glob("*.whl")
    return wheel, archive


def _run_backend(hook: str, tree: Path, target: Path) -> None:
    subprocess.run([sys.executable, "-c", _BACKEND, hook, str(target)], cwd=tree, check=True, stdout=subprocess.DEVNULL)


def check_contents(wheel: Path) -> Message:
    """Compare the wheel with the source, file by file, and look at its metadata, which is returned."""
    with zipfile.ZipFile(wheel) as file:
        beside = f"headway-{version()}.dist-info/"
        held = {name for name in file.namelist() if not name.startswith(beside)}
        about = Parser().parsestr(file.read(f"{beside}METADATA").decode())
    package = ROOT / "src"
    wanted = {str(each.relative_to(package)) for each in package.rglob("*") if each.is_file()}
    wanted = {name for name in wanted if "__pycache__/" not in name and ".egg-info/" not in name}
    assert held == wanted, f"the wheel lacks {sorted(wanted - held)}, and should not hold {sorted(held - wanted)}"
    for field in (
        "Author",
        "Keywords",
        "Classifier",
        "License-Expression",
        "Description-Content-Type",
        "Requires-Python",
    ):
        assert about[field], f"the metadata has no {field}"
    assert about["Version"] == version()
    extras = set(about.get_all("Provides-Extra") or ())
    assert extras >= _EXTRAS, f"the metadata lacks the extras {sorted(_EXTRAS - extras)}"
    return about


def check_in_an_empty_environment(archive: Path) -> None:
    """Install the wheel, or the source archive, alone; run the command and a step of training far from this checkout."""
    with tempfile.TemporaryDirectory() as folder:
        venv = Path(folder) / "venv"
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        python = venv / "bin/python"
        # The lent one builds; what venv brings is too old for pyproject.toml.
        subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools"], check=True)
        (site,) = venv.glob("lib/python*/site-packages")
        lent = [path for path in sys.path if path.endswith("site-packages")]  # their own .pth files are not followed
        (site / "lent.pth").write_text("\n".join(lent) + "\n")
        options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed"]
        subprocess.run([python, "-m", "pip", "install", *options, archive], check=True)
        for command in (
            [python, "-c", _TRAINS.format(venv=venv)],
            [venv / "bin/headway", "--version"],
            [venv / "bin/headway", "launch", "--help"],
            [python, "-m", "headway", "completion", "bash"],
        ):
            # Isolated from PYTHONPATH, which may name this checkout.
            environment = {"PATH": f"{venv}/bin:/usr/bin:/bin", "HOME": folder}
            told = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
            assert told.returncode == 0, f"{command}: {told.stderr}"


def main() -> None:
    """Build and check; what was built stays in dist/."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="the repository, such as https://example.org/headway")
    url = parser.parse_args().url or None
    wheel, archive = build(ROOT / "dist", url)
    check_contents(wheel)
    for each in (wheel, archive):
        check_in_an_empty_environment(each)
    print(f"{wheel}\n{archive}")


if __name__ == "__main__":
    main()
