"""Puts the built site beside those of earlier versions: `python scripts/versions.py SITES NAME` copies build/site to SITES/NAME.

SITES is what is served. Its front page leads to the newest release, or to the only site; `versions.json` is what the site's menu of
versions reads, in the format of mike.
"""

import json
import re
import shutil
import sys
from pathlib import Path

SITE = Path(__file__).resolve().parent.parent / "build" / "site"


def _order(name: str) -> tuple[bool, list[int]]:
    return bool(re.match(r"\d", name)), [int(number) for number in re.findall(r"\d+", name)]


def publish(site: Path, sites: Path, name: str) -> str:
    """Copy the site, and return the version that the front page leads to."""
    shutil.rmtree(sites / name, ignore_errors=True)
    shutil.copytree(site, sites / name)
    found = sorted((each.parent.name for each in sites.glob("*/index.html")), key=_order, reverse=True)
    listed = [{"version": each, "title": each, "aliases": []} for each in found]
    (sites / "versions.json").write_text(json.dumps(listed, indent=1))
    (sites / "index.html").write_text(f'<meta http-equiv="refresh" content="0; url={found[0]}/index.html">\n')
    (sites / ".nojekyll").touch()
    return found[0]


if __name__ == "__main__":
    print(publish(SITE, Path(sys.argv[1]), sys.argv[2].removeprefix("v")))
