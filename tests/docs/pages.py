"""Reads a Markdown page: its code blocks with their line numbers, its hidden set-up, its commands, its links."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_OPEN = re.compile(r"^```(\w*)\s*$")
_FILE = re.compile(r"^<!-- file: (\S+) -->$")
_LINK = re.compile(r"(?<!\!)\[[^\]]+\]\(([^)#\s]+)(?:#[^)]*)?\)")


@dataclass
class Block:
    """A fenced block, or a hidden `<!-- setup ... -->` one, which is Python.

    Attributes:
        kind: the language after the fence; "python" for a hidden block.
        line: the number of its first line of text.
        text: what stands in it.
        file: the name that a `<!-- file: NAME -->` line right above gives it.
    """

    kind: str
    line: int
    text: str
    file: str = ""


def pages() -> list[Path]:
    """README.md and everything in docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """The page's blocks in order."""
    lines = page.read_text().splitlines()
    found: list[Block] = []
    index = 0
    while index < len(lines):
        opened = _OPEN.match(lines[index])
        is_hidden = lines[index].strip() == "<!-- setup"
        if not opened and not is_hidden:
            index += 1
            continue
        end = index + 1
        while lines[end].strip() != ("-->" if is_hidden else "```"):
            end += 1
        named = _FILE.match(lines[index - 1].strip()) if index else None
        kind = "python" if is_hidden else opened[1]  # type: ignore[index]
        found.append(Block(kind, index + 2, "\n".join(lines[index + 1 : end]), named[1] if named else ""))
        index = end + 1
    return found


def commands(page: Path) -> list[str]:
    """Command lines in its console blocks (after `$ `) and bash blocks, continuation lines joined."""
    found = []
    for block in blocks(page):
        if block.kind in ("console", "bash"):
            text = block.text.replace("\\\n", " ")
            for line in text.splitlines():
                if block.kind == "bash" and line.strip():
                    found.append(line.strip())
                elif line.startswith("$ "):
                    found.append(line[2:].strip())
    return found


def links(page: Path) -> list[str]:
    """Targets of its links to files of the project."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return [target for target in _LINK.findall(text) if "://" not in target and not target.startswith("mailto:")]
