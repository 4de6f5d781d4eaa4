"""Formats rows of text as aligned columns."""


def format_columns(rows: list[list[str]]) -> str:
    """Return the rows as lines, with the first column aligned to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [
        [row[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(row[1:], widths[1:]))] for row in rows
    ]
    return "\n".join("  ".join(line) for line in lines)
