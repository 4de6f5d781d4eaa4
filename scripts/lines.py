"""Count the lines of code in src by folder, without docstrings, comments and blank lines: `python scripts/lines.py`."""

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "headway"
_NOT_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def count_lines_of_code(text: str) -> int:
    """Return the number of lines of code in a module's text."""
    code_lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NOT_CODE:
            code_lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            code_lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(code_lines)


def count_by_folder() -> Counter[str]:
    """Return the lines of code by folder or file at the top of the package."""
    lines: Counter[str] = Counter()
    for file in SOURCE.rglob("*.py"):
        lines[file.relative_to(SOURCE).parts[0]] += count_lines_of_code(file.read_text())
    return lines


if __name__ == "__main__":
    for folder, lines in count_by_folder().most_common():
        print(f"{lines:7,}  {folder}")
    print(f"{sum(count_by_folder().values()):7,}  in {len(list(SOURCE.rglob('*.py')))} files")
