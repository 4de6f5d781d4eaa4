"""Colors and dash patterns of the lines in a report, and the swatches that show a run's color.

The colors can be distinguished with any color vision, on a light and on a dark page. They were found by a search
over lightness, chroma and hue within each hue's range. The search maximizes the smallest distance (in Oklab) between
any two colors as seen with normal, red-, green- and blue-blind vision. The vision is simulated after Machado,
Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision Deficiency", 2009. The first
four colors have the most weight, and the contrast with the page is 3:1 or more. A test checks these numbers.
"""

LINE_COLORS = ("#0071e7", "#d57a2b", "#0d7057", "#ac45a1", "#6c4c00", "#00a3b8", "#512aae", "#722d2b")
"""Line colors on a light page.

With several runs, each run has a color. With a single run, each line of a chart has a color.
"""
LINE_COLORS_DARK = ("#0ea2ff", "#ff723d", "#72dea0", "#c573be", "#ffc400", "#8ef5fd", "#c2b1f6", "#da847d")
"""Line colors on a dark page, in the order of `LINE_COLORS`."""
PAGE_COLOR = "#ffffff"
"""Background color of charts on a light page, as in the variable `--card` of `style.css`."""
PAGE_COLOR_DARK = "#17191d"
"""Background color of charts on a dark page."""


def choose_color(index: int) -> int:
    """Return the index of a line's color in `LINE_COLORS`. Colors repeat if there are more lines than colors."""
    return index % len(LINE_COLORS)


def choose_dash(index: int) -> str:
    """Return the SVG dash pattern of a line, which distinguishes lines with equal colors; empty for a solid line."""
    return ("", "7 3", "2 3", "9 3 2 3")[index // len(LINE_COLORS) % 4]


def render_colors() -> str:
    """Return the CSS of the line colors: variables for light and dark pages, and one class per color."""
    light = "".join(f"--c{index}:{value};" for index, value in enumerate(LINE_COLORS))
    dark = "".join(f"--c{index}:{value};" for index, value in enumerate(LINE_COLORS_DARK))
    classes = "".join(f".c{index}{{--c:var(--c{index})}}" for index in range(len(LINE_COLORS)))
    return f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}{classes}"


def render_swatch(index: int) -> str:
    """Return a small square in a run's color, as HTML.

    Args:
        index: Index of the run in the report. Runs that share a color get squares with different stripes.
    """
    pattern = index // len(LINE_COLORS) % 4
    return f'<i class="swatch c{choose_color(index)} round{pattern}"></i>'
