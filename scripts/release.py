"""Build the source archive, and the wheel from it, into dist/, and check both in an empty environment.

`python scripts/release.py [--url URL] [--tag]`. URL is the address of the repository, which a checkout does not know.
With it, README's links are absolute and the metadata names the project's pages. The archives contain what git tracks.
Headway's dependencies are taken from the environment that runs this script.

`--tag` adds the annotated tag `v<version>` to the current commit after all checks have passed, or checks an existing tag.
It never pushes.
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
_EXTRAS = {"cuda", "trackers", "plots", "deepspeed", "s3"}  # extras that the documentation mentions
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


def read_version() -> str:
    """Return the version of Headway without importing it."""
    return re.findall(r'__version__ = "(.+)"', (ROOT / "src/headway/version.py").read_text())[0]


def make_links_absolute(text: str, url: str) -> str:
    """Return a page whose links to files of the repository are absolute, at the tag of this version."""
    kinds = {"": "blob", "!": "raw"}
    return _LINK.sub(lambda link: f"{link[1]}[{link[2]}]({url}/{kinds[link[1]]}/v{read_version()}/{link[3]})", text)


def build(target: Path, url: str | None) -> tuple[Path, Path]:
    """Build the wheel and the source archive in `target` and return their paths."""
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
            readme.write_text(make_links_absolute(readme.read_text(), url))
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
    """Compare the wheel with the source, file by file, check its metadata, and return the metadata."""
    with zipfile.ZipFile(wheel) as file:
        info = f"headway-{read_version()}.dist-info/"
        contained = {name for name in file.namelist() if not name.startswith(info)}
        metadata = Parser().parsestr(file.read(f"{info}METADATA").decode())
    package = ROOT / "src"
    expected = {str(path.relative_to(package)) for path in package.rglob("*") if path.is_file()}
    expected = {name for name in expected if "__pycache__/" not in name and ".egg-info/" not in name}
    assert contained == expected, (
        f"the wheel lacks {sorted(expected - contained)}, and must not contain {sorted(contained - expected)}"
    )
    for field in (
        "Author",
        "Keywords",
        "Classifier",
        "License-Expression",
        "Description-Content-Type",
        "Requires-Python",
    ):
        assert metadata[field], f"the metadata has no {field}"
    assert metadata["Version"] == read_version()
    extras = set(metadata.get_all("Provides-Extra") or ())
    assert extras >= _EXTRAS, f"the metadata lacks the extras {sorted(_EXTRAS - extras)}"
    return metadata


def check_in_an_empty_environment(archive: Path) -> None:
    """Install only the wheel or the source archive, then run the command and a training step outside of this checkout."""
    with tempfile.TemporaryDirectory() as folder:
        venv = Path(folder) / "venv"
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        python = venv / "bin/python"
        # The setuptools of this script's environment builds; the one of venv is too old for pyproject.toml.
        subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools"], check=True)
        (site,) = venv.glob("lib/python*/site-packages")
        shared = [
            path for path in sys.path if path.endswith("site-packages")
        ]  # Python does not follow their .pth files
        (site / "shared.pth").write_text("\n".join(shared) + "\n")
        options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed"]
        subprocess.run([python, "-m", "pip", "install", *options, archive], check=True)
        for command in (
            [python, "-c", _TRAINS.format(venv=venv)],
            [venv / "bin/headway", "--version"],
            [venv / "bin/headway", "launch", "--help"],
            [python, "-m", "headway", "completion", "bash"],
        ):
            # Without PYTHONPATH, which may contain this checkout.
            environment = {"PATH": f"{venv}/bin:/usr/bin:/bin", "HOME": folder}
            finished = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
            assert finished.returncode == 0, f"{command}: {finished.stderr}"


def run_git(root: Path, *arguments: str) -> str:
    """Run git in a repository and return its output without the last line break."""
    finished = subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=True, text=True)
    return finished.stdout.rstrip("\n")


def check_ready_for_tag(root: Path = ROOT) -> None:
    """Exit if the repository is not ready for the tag of this version.

    There must be no uncommitted changes, the changelog must have a section for the version, and a tag that exists must
    be annotated and on the current commit.

    Args:
        root: Folder of the repository.
    """
    name = f"v{read_version()}"
    if changed := run_git(root, "status", "--porcelain"):
        sys.exit(f"{name} was not tagged: there are uncommitted changes; commit them first\n{changed}")
    if f"## [{read_version()}]" not in (root / "CHANGELOG.md").read_text():
        sys.exit(f"{name} was not tagged: CHANGELOG.md has no section ## [{read_version()}]")
    if not run_git(root, "tag", "--list", name):
        return
    if run_git(root, "cat-file", "-t", name) != "tag":
        sys.exit(f"{name} is a lightweight tag; delete it (git tag -d {name}), and run this again")
    tagged, current = (run_git(root, "rev-parse", f"{revision}^{{commit}}") for revision in (name, "HEAD"))
    if tagged != current:
        sys.exit(f"{name} is at {tagged[:10]} and not at the current commit {current[:10]}; a released tag never moves")


def add_tag(root: Path = ROOT) -> str:
    """Add the annotated tag of this version to the current commit if it does not exist, and return its name."""
    name = f"v{read_version()}"
    if not run_git(root, "tag", "--list", name):
        run_git(root, "tag", "--annotate", name, "--message", f"Headway {read_version()}")
    return name


def main() -> None:
    """Build and check the archives, and leave them in dist/. With `--tag`, add the tag."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="address of the repository, such as https://example.org/headway")
    parser.add_argument("--tag", action="store_true", help="add the annotated tag of this version, or check it")
    arguments = parser.parse_args()
    url = arguments.url or None
    if arguments.tag:
        check_ready_for_tag()
    wheel, archive = build(ROOT / "dist", url)
    check_contents(wheel)
    for distribution in (wheel, archive):
        check_in_an_empty_environment(distribution)
    print(f"{wheel}\n{archive}")
    if arguments.tag:
        name = add_tag()
        print(f"tag {name} is on the current commit; publish it with: git push origin {name}")


if __name__ == "__main__":
    main()
