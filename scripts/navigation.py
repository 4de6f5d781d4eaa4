"""Write the list of pages in docs/index.md and the menu in docs/site.yml from docs/navigation.yml.

`python scripts/navigation.py` prints the list; `--write` puts both between the markers in the two files.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).resolve().parent.parent / "docs"
SOURCE = DOCS / "navigation.yml"
MAX_PAGES_SHOWN = 7
"""Largest number of pages that a group lists before the others, which appear under "More"."""
MARKERS = {"index.md": ("<!-- pages -->", "<!-- /pages -->"), "site.yml": ("  # <pages>", "  # </pages>")}
"""Start and end of the generated part, by file."""


@dataclass(frozen=True)
class Group:
    """Pages for one kind of task.

    Attributes:
        title: Title, such as "Train".
        about: One sentence on what the pages help with.
        pages: {file name: description} of the pages to show first.
        more: {file name: description} of the other pages.
    """

    title: str
    about: str
    pages: dict[str, str]
    more: dict[str, str]


def read_groups() -> list[Group]:
    """Return the groups of docs/navigation.yml in their order."""
    content: dict[str, dict[str, Any]] = yaml.safe_load(SOURCE.read_text())
    return [Group(title, part["about"], part["pages"], part.get("more", {})) for title, part in content.items()]


def read_title(page: str) -> str:
    """Return the first heading of a page in docs/."""
    return (DOCS / page).read_text().partition("\n")[0].lstrip("# ")


def render_index(groups: list[Group]) -> str:
    """Return the Markdown list of all pages, by group."""
    parts = []
    for group in groups:
        # The part of a title after its colon would repeat the description.
        lines = [f"- [{read_title(page).partition(':')[0]}]({page}): {text}" for page, text in group.pages.items()]
        if group.more:
            lines.append("- More: " + ", ".join(f"[{read_title(page)}]({page})" for page in group.more) + ".")
        parts.append("\n".join([f"### {group.title}", "", group.about, "", *lines]))
    return "\n\n".join(parts)


def render_menu(groups: list[Group]) -> str:
    """Return the entries of the site's menu as YAML, except the reference, which scripts/pages.py adds."""
    lines = ["  - Home: index.md"]
    for group in groups:
        lines.append(f"  - {group.title}:")
        lines += [f"    - {page}" for page in group.pages if page != "reference.md"]
        if group.more:
            lines.append("    - More:")
            lines += [f"      - {page}" for page in group.more]
    return "\n".join(lines)


def replace_marked(name: str, content: str) -> str:
    """Return the text of docs/`name` with `content` between its markers.

    Raises:
        ValueError: If the file has no markers.
    """
    start, end = MARKERS[name]
    before, found_start, rest = (DOCS / name).read_text().partition(start)
    _, found_end, after = rest.partition(end)
    if not (found_start and found_end):
        raise ValueError(f"docs/{name} needs the markers {start} and {end}")
    separator = "\n" if name.endswith(".yml") else "\n\n"
    return f"{before}{start}{separator}{content}{separator}{end}{after}"


def render() -> dict[str, str]:
    """Return the full text of both generated files, by name."""
    groups = read_groups()
    return {
        "index.md": replace_marked("index.md", render_index(groups)),
        "site.yml": replace_marked("site.yml", render_menu(groups)),
    }


if __name__ == "__main__":
    if "--write" in sys.argv:
        for name, text in render().items():
            (DOCS / name).write_text(text)
    else:
        print(render_index(read_groups()))
