"""Add the built site to the sites of earlier versions: `python scripts/versions.py SITES NAME` copies build/site to SITES/NAME.

SITES is the folder that a web server serves. Its front page redirects to the newest release, or to the only site. The site's menu of
versions reads `versions.json`, which has the format of mike.
"""

import json
import re
import shutil
import sys
from pathlib import Path

SITE = Path(__file__).resolve().parent.parent / "build" / "site"


def _make_sort_key(name: str) -> tuple[bool, list[int]]:
    """Sort releases by their numbers, after all names that are not releases."""
    return bool(re.match(r"\d", name)), [int(number) for number in re.findall(r"\d+", name)]


def publish(site: Path, sites: Path, name: str) -> str:
    """Copy the site, update the list of versions, and return the version that the front page redirects to."""
    shutil.rmtree(sites / name, ignore_errors=True)
    shutil.copytree(site, sites / name)
    versions = sorted((page.parent.name for page in sites.glob("*/index.html")), key=_make_sort_key, reverse=True)
    entries = [{"version": version, "title": version, "aliases": []} for version in versions]
    (sites / "versions.json").write_text(json.dumps(entries, indent=1))
    (sites / "index.html").write_text(f'<meta http-equiv="refresh" content="0; url={versions[0]}/index.html">\n')
    (sites / ".nojekyll").touch()
    return versions[0]


if __name__ == "__main__":
    print(publish(SITE, Path(sys.argv[1]), sys.argv[2].removeprefix("v")))
