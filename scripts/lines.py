"""Counts the lines of code in src: without docstrings, comments and blank lines, by room. `python scripts/lines.py` prints them."""

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "headway"
_BESIDE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def count(text: str) -> int:
    """Lines of code in a module's text."""
    inside: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _BESIDE:
            inside.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            inside.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(inside)


def rooms() -> Counter[str]:
    """Lines of code by the folder, or file, at the top of the package."""
    found: Counter[str] = Counter()
    for file in SOURCE.rglob("*.py"):
        found[file.relative_to(SOURCE).parts[0]] += count(file.read_text())
    return found


if __name__ == "__main__":
    for room, lines in rooms().most_common():
        print(f"{lines:7,}  {room}")
    print(f"{sum(rooms().values()):7,}  in {len(list(SOURCE.rglob('*.py')))} files")
