"""Parse a Markdown page: its code blocks with line numbers, hidden setup blocks, commands and links."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_OPEN = re.compile(r"^```(\w*)\s*$")
_FILE = re.compile(r"^<!-- file: (\S+) -->$")
_LINK = re.compile(r"(?<!\!)\[[^\]]+\]\(([^)#\s]+)(?:#[^)]*)?\)")


@dataclass
class Block:
    """A fenced code block, or a hidden `<!-- setup ... -->` block of Python code.

    Attributes:
        kind: Language after the fence; "python" for a hidden block.
        line: Line number of the first line inside the block, from 1.
        text: Lines inside the block.
        file: File name from a `<!-- file: NAME -->` line directly above the block; otherwise empty.
    """

    kind: str
    line: int
    text: str
    file: str = ""


def list_pages() -> list[Path]:
    """Return README.md and every Markdown page in docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def parse_blocks(page: Path) -> list[Block]:
    """Return the code blocks of a page, in order."""
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


def list_commands(page: Path) -> list[str]:
    """Return the command lines of a page: lines after `$ ` in console blocks, and all lines of bash blocks.

    Continuation lines are joined.
    """
    found = []
    for block in parse_blocks(page):
        if block.kind in ("console", "bash"):
            text = block.text.replace("\\\n", " ")
            for line in text.splitlines():
                if block.kind == "bash" and line.strip():
                    found.append(line.strip())
                elif line.startswith("$ "):
                    found.append(line[2:].strip())
    return found


def list_links(page: Path) -> list[str]:
    """Return the link targets of a page that are files of this project."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return [target for target in _LINK.findall(text) if "://" not in target and not target.startswith("mailto:")]
