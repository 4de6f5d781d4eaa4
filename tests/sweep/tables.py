"""Rows of text as columns."""


def laid_out(rows: list[list[str]]) -> str:
    """The first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [
        [row[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(row[1:], widths[1:]))] for row in rows
    ]
    return "\n".join("  ".join(line) for line in lines)
