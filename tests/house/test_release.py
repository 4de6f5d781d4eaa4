"""Files for releases and contributors: archives, tags, workflows, issue forms, versions and the published site."""

import re
import sys
from functools import partial

import pytest
import yaml

from tests.house.tree_of_source import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import release
import versions

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
README = (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_archives_install_and_work_in_an_empty_environment(tmp_path):
    wheel, archive = release.build(tmp_path / "dist", "https://example.org/headway")
    about = release.check_contents(wheel)
    assert archive.name == f"headway-{release.read_version()}.tar.gz"
    assert "Repository, https://example.org/headway" in about.get_all("Project-URL")
    assert re.findall(r"\]\((?!https://|#)[^)]*\)", about.get_payload()) == []
    for each in (wheel, archive):
        release.check_in_an_empty_environment(each)


def test_tag_needs_a_clean_commit_with_a_changelog_section(tmp_path, monkeypatch):
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "a")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "a@example.org")
    tag = f"v{release.read_version()}"
    git = partial(release.run_git, tmp_path)
    git("init", "--quiet")
    changes = tmp_path / "CHANGELOG.md"
    changes.write_text("# Changelog\n")
    with pytest.raises(SystemExit, match="uncommitted changes"):
        release.check_ready_for_tag(tmp_path)
    git("add", ".")
    git("commit", "--quiet", "--message", "one")
    with pytest.raises(SystemExit, match="has no section"):
        release.check_ready_for_tag(tmp_path)
    changes.write_text(f"# Changelog\n\n## [{release.read_version()}] - today\n")
    git("commit", "--quiet", "--all", "--message", "two")
    git("tag", tag)
    with pytest.raises(SystemExit, match="lightweight"):
        release.check_ready_for_tag(tmp_path)
    git("tag", "--delete", tag)
    for _ in range(2):  # the second time, the tag exists already
        release.check_ready_for_tag(tmp_path)
        assert release.add_tag(tmp_path) == tag
    assert git("cat-file", "-t", tag) == "tag"
    assert git("tag", "--list", "--format", "%(subject)") == f"Headway {release.read_version()}"
    git("commit", "--quiet", "--allow-empty", "--message", "three")
    with pytest.raises(SystemExit, match="not at the current commit"):
        release.check_ready_for_tag(tmp_path)


def test_classifiers_name_each_supported_python():
    text = (ROOT / "pyproject.toml").read_text()
    oldest = int(re.search(r'requires-python = ">=3\.(\d+)"', text)[1])
    named = [int(minor) for minor in re.findall(r'"Programming Language :: Python :: 3\.(\d+)"', text)]
    assert named == list(range(oldest, 14))
    assert f'target-version = "py3{oldest}"' in text
    assert f'python_version = "3.{oldest}"' in text


def test_links_of_the_readme_exist_and_become_absolute():
    assert (
        re.findall(r"(?i)unchanged|!\[[^\]]*\]\(http", README.partition("```")[0]) == []
    )  # no such claim and no badge
    for _, _, target in release._LINK.findall(README):
        assert (ROOT / target.partition("#")[0]).exists(), target
    found = release.make_links_absolute("[a](docs/b.md#c) ![d](e.png) [f](https://g) [h](#i)", "https://x.org/y")
    at = f"v{release.read_version()}"
    assert found == (
        f"[a](https://x.org/y/blob/{at}/docs/b.md#c) ![d](https://x.org/y/raw/{at}/e.png) [f](https://g) [h](#i)"
    )


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_workflow_is_well_formed_and_its_commands_exist(file):
    workflow = yaml.safe_load(file.read_text())
    assert set(workflow) <= {"name", True, "permissions", "concurrency", "jobs"}  # YAML 1.1 reads `on` as true
    assert set(workflow[True]) <= {"push", "pull_request", "workflow_dispatch"}
    assert workflow["permissions"], "without permissions in the workflow, jobs get the repository's default permissions"
    jobs = workflow["jobs"]
    for job in jobs.values():
        known = {"runs-on", "timeout-minutes", "steps", "if", "needs", "environment", "permissions"}
        assert {"runs-on", "steps"} <= set(job) <= known
        assert set(re.findall(r"\w+", str(job.get("needs", "")))) <= set(jobs)
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step), step
            assert set(step) <= {"uses", "with", "run", "if", "name"}
            if "uses" in step:
                assert re.fullmatch(r"[\w-]+/[\w-]+@[\w./-]+", step["uses"]), "actions must be pinned to a version"
            for target in re.findall(r"\bmake ([a-z-]+)", step.get("run", "")):
                assert target in TARGETS
            for path in re.findall(r"(?:\./)?((?:\.ci|scripts)/[\w.]+)", step.get("run", "")):
                assert (ROOT / path).exists(), path


def test_workflow_runs_the_ci_script():
    assert ".ci/run" in (ROOT / ".github/workflows/tests.yml").read_text()


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_issue_form_is_well_formed(name):
    form = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{name}.yml").read_text())
    assert {"name", "description", "body"} <= set(form)
    assert [part["type"] for part in form["body"]] == ["textarea"] * len(form["body"])
    assert len({part["id"] for part in form["body"]}) == len(form["body"])
    assert all(part["attributes"]["label"] for part in form["body"])


def test_pre_commit_hooks_match_make_check():
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    recipe = re.search(r"^check: .*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    assert [hook["entry"] for hook in repo["hooks"]] == re.findall(r"\t\$\(BIN\)/(.*)", recipe)


def test_conda_recipe_and_citation_have_the_same_version_and_packages():
    recipe = yaml.safe_load((ROOT / "conda/recipe.yaml").read_text())
    assert recipe["context"]["version"] == release.read_version()
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == release.read_version()
    section = re.search(r"^dependencies = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)[1]
    names = {"torch": "pytorch", "xxhash": "python-xxhash"}
    expected = [
        f"{names.get(name.lower(), name.lower())} >={least}"
        for name, least in re.findall(r'"(\w+)>=([\d.]+)"', section)
    ]
    assert recipe["requirements"]["run"] == ["python >=3.10", *expected]


def test_publishing_a_site_keeps_those_of_other_versions(tmp_path):
    site, sites = tmp_path / "site", tmp_path / "sites"
    site.mkdir()
    (site / "index.html").write_text("old")
    assert versions.publish(site, sites, "main") == "main"
    assert versions.publish(site, sites, "2026.9.0") == "2026.9.0"
    (site / "index.html").write_text("new")
    assert versions.publish(site, sites, "2026.11.0") == "2026.11.0"
    assert (sites / "2026.9.0/index.html").read_text() == "old"
    listed = [each["version"] for each in yaml.safe_load((sites / "versions.json").read_text())]
    assert listed == ["2026.11.0", "2026.9.0", "main"]
    assert "url=2026.11.0/index.html" in (sites / "index.html").read_text()
