"""Test the lines of a report: colors and dashes can be distinguished."""

import math
from itertools import combinations

import pytest

from headway.core.tracking.report import line_styles

# Machado, Oliveira and Fernandes (2009), severity 1.0, on linear RGB.
EYES = {
    "all colors": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "no blue": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def to_linear_rgb(code):
    parts = (int(code[index : index + 2], 16) / 255 for index in (1, 3, 5))
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def to_oklab(rgb):
    """Convert a color to Ottosson's perceptual space, in which distances are perceived differences."""
    red, green, blue = (min(1, max(0, part)) for part in rgb)
    long = (0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue) ** (1 / 3)
    middle = (0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue) ** (1 / 3)
    brief = (0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue) ** (1 / 3)
    return (
        0.2104542553 * long + 0.7936177850 * middle - 0.0040720468 * brief,
        1.9779984951 * long - 2.4285922050 * middle + 0.4505937099 * brief,
        0.0259040371 * long + 0.7827717662 * middle - 0.8086757660 * brief,
    )


def compute_contrast(one, other):
    dark, light = sorted(0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in (to_linear_rgb(one), to_linear_rgb(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("eyes", EYES)
@pytest.mark.parametrize("colors", [line_styles.LINE_COLORS, line_styles.LINE_COLORS_DARK], ids=["light", "dark"])
def test_lines_can_be_distinguished_with_any_color_vision(colors, eyes):
    seen = [to_oklab([sum(a * b for a, b in zip(row, to_linear_rgb(code))) for row in EYES[eyes]]) for code in colors]
    for one, other in combinations(range(len(colors)), 2):
        needed = 0.10 if other < 4 else 0.085 if other < 6 else 0.055
        assert math.dist(seen[one], seen[other]) >= needed, (colors[one], colors[other])


@pytest.mark.parametrize(
    ("colors", "page"),
    [(line_styles.LINE_COLORS, line_styles.PAGE_COLOR), (line_styles.LINE_COLORS_DARK, line_styles.PAGE_COLOR_DARK)],
)
def test_lines_have_enough_contrast_with_the_page(colors, page):
    assert all(compute_contrast(code, page) >= 3 for code in colors)


def test_more_runs_than_colors_differ_by_dashes():
    drawn = [(line_styles.choose_color(index), line_styles.choose_dash(index)) for index in range(32)]
    assert len(set(drawn)) == 32
