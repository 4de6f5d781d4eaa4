"""Draw the output of a command as an SVG picture of a terminal, with its colors.

python scripts/terminal_picture.py docs/images/verify.svg FOLDER headway verify train.py

The command runs in FOLDER under a pseudo-terminal, as if a person had typed it. The picture needs no external font or
script.
"""

import argparse
import os
import pty
import re
import subprocess
from pathlib import Path
from xml.sax.saxutils import escape

COLORS = {"31": "#f47067", "32": "#57ab5a", "33": "#daaa3f"}
"""Colors by ANSI code: red, green and yellow."""
TEXT, BACKGROUND, BAR = "#cdd9e5", "#1c2128", "#2d333b"
WIDTH, HEIGHT, MARGIN, TOP = 7.85, 19, 16, 44
"""Width of a character, height of a line, and the margins around the text, in pixels."""
SKIPPED = ("headway: running ",)
"""Prefixes of lines that are left out, because they only report progress."""
_CODE = re.compile(r"\033\[(\d*)m")


def run_command(command: list[str], folder: str) -> str:
    """Run a command under a pseudo-terminal, and return its output."""
    parent, child = pty.openpty()
    process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=child, stderr=child)
    os.close(child)
    chunks = []
    while True:
        try:
            chunk = os.read(parent, 65536)
        except OSError:  # Linux reports the end of a pseudo-terminal as an error
            break
        if not chunk:
            break
        chunks.append(chunk)
    process.wait()
    return b"".join(chunks).decode().replace("\r\n", "\n")


def draw(title: str, lines: list[str]) -> str:
    """Return the SVG text of a terminal window.

    Args:
        title: Title of the window, which is also the description of the picture for screen readers.
        lines: Lines of text with ANSI color codes.
    """
    longest = max(len(_CODE.sub("", line)) for line in lines)
    width, height = round(longest * WIDTH + 2 * MARGIN), TOP + len(lines) * HEIGHT + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" rx="8" fill="{BACKGROUND}"/>',
        f'<path d="M0 28V8a8 8 0 0 1 8-8h{width - 16}a8 8 0 0 1 8 8v20z" fill="{BAR}"/>',
        *(
            f'<circle cx="{18 + 18 * number}" cy="14" r="5" fill="{color}"/>'
            for number, color in enumerate(("#f47067", "#daaa3f", "#57ab5a"))
        ),
        f'<g font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,monospace" font-size="13" fill="{TEXT}">',
    ]
    for number, line in enumerate(lines):
        position = f'x="{MARGIN}" y="{TOP + number * HEIGHT + 4}"'
        length = f'textLength="{len(_CODE.sub("", line)) * WIDTH:.1f}"' if line else ""
        parts.append(f'<text {position} {length} xml:space="preserve">{_color(line)}</text>')
    return "\n".join([*parts, "</g>", "</svg>", ""])


def _color(line: str) -> str:
    """Return a line as SVG, with a colored span for each ANSI color."""
    plain, *rest = _CODE.split(line)
    spans = [escape(plain)]
    for code, text in zip(rest[::2], rest[1::2], strict=True):
        color = COLORS.get(code)
        spans.append(f'<tspan fill="{color}">{escape(text)}</tspan>' if color and text else escape(text))
    return "".join(spans)


def main() -> None:
    """Run the command, and write the picture of its output."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("folder", help="folder in which the command runs")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    output = run_command(args.command, args.folder)
    typed = " ".join(args.command)
    lines = [line for line in output.rstrip().splitlines() if not line.startswith(SKIPPED)]
    args.picture.write_text(draw(typed, [f"$ {typed}", *lines]), encoding="utf-8")


if __name__ == "__main__":
    main()
