"""Colours that people with any colour vision can tell apart, for a light and a dark page.

Found by a search over lightness, chroma and hue within each hue's range: it maximises the least distance (in Oklab) of any two
as seen by people with normal, red-, green- and blue-blind vision (simulated after Machado, Oliveira and Fernandes, "A
Physiologically-based Model for Simulation of Color Vision Deficiency", 2009), the first four weighing most, with a contrast of
3:1 or more to the page. A test holds the numbers.
"""

LINES = ("#0071e7", "#d57a2b", "#0d7057", "#ac45a1", "#6c4c00", "#00a3b8", "#512aae", "#722d2b")
"""Lines on a light page, by run; for one run by line."""

LINES_DARK = ("#0ea2ff", "#ff723d", "#72dea0", "#c573be", "#ffc400", "#8ef5fd", "#c2b1f6", "#da847d")
"""The same lines on a dark page."""

PAGE = "#ffffff"
PAGE_DARK = "#17191d"
"""What lines are drawn on."""


def colour(index: int) -> int:
    """The palette's entry for a line; it begins anew after the last."""
    return index % len(LINES)


def dash(index: int) -> str:
    """How lines are dashed that share a colour with an earlier one: an SVG dash pattern, empty for a solid line."""
    return ("", "7 3", "2 3", "9 3 2 3")[index // len(LINES) % 4]


def css() -> str:
    """Custom properties for both pages and one class for each colour."""
    light = "".join(f"--c{index}:{value};" for index, value in enumerate(LINES))
    dark = "".join(f"--c{index}:{value};" for index, value in enumerate(LINES_DARK))
    classes = "".join(f".c{index}{{--c:var(--c{index})}}" for index in range(len(LINES)))
    return f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}{classes}"
