"""The page of a memory forecast: memory over the step by what it is held for, and against the batch; drawn without a script."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from headway.common.text import format_bytes
from headway.tracking.report import looks
from headway.tracking.report.looks import document
from headway.tracking.report.tables import Fact, swatch, tiles

_WIDTH, _HEIGHT = 1200, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 96, 16, 26, 48
_ANSWERS = {True: ("fits", "good"), False: ("does not fit", "bad"), None: ("too close to tell", "warn")}
_AREA = "fill:var(--c);opacity:.78"


def forecast_page(title: str, found: Mapping[str, Any]) -> str:
    """The whole page.

    Args:
        title: what was forecast.
        found: the forecast, as `Forecast.as_dict()` gives it.
    """
    parts = [
        _render_header(title, found),
        _render_tiles(found),
        _render_chart("Memory over two steps", *_draw_timeline(found["timeline"])),
    ]
    if found["by_batch"]:
        parts.append(_render_chart("Memory against the batch", *_draw_by_batch(found)))
    parts += [_render_split(found), _render_notes(found)]
    return document(f"{title} · Headway forecast", "\n".join(parts))


def _render_header(title: str, found: Mapping[str, Any]) -> str:
    pill = ""
    if found["budget"] is not None:
        word, tone = _ANSWERS[found["fits"]]
        pill = f' <span class="pill {tone}">{word}</span>'
    about = f"{found['device']}, a batch of {found['batch_size']}"
    return f'<header><h1>{escape(title)}{pill}</h1><p class="about">{escape(about)}</p></header>'


def _render_tiles(found: Mapping[str, Any]) -> str:
    span = f"{format_bytes(found['least'])} to {format_bytes(found['most'])}"
    figures = [
        Fact("in use on the device", format_bytes(found["total"]), span),
        Fact("tensors", format_bytes(found["allocated"]), f"the most in {found['peak']}"),
        Fact("allocator", format_bytes(found["reserved"]), "taken from the device by torch"),
    ]
    if found["budget"] is not None:
        figures.append(Fact("budget", format_bytes(found["budget"]), "of the whole process"))
    for name, key in (("largest batch", "largest_batch"), ("longest sequence", "longest_sequence")):
        if found[key] is not None:
            figures.append(Fact(name, f"{found[key]:,}", "that stays within the budget"))
    return tiles(figures)


def _render_chart(title: str, keys: str, drawing: str) -> str:
    return (
        f'<section><h2>{escape(title)}</h2><figure class="card wide"><figcaption>{keys}</figcaption><div class="plot">'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title, quote=True)}">{drawing}</svg>'
        "</div></figure></section>"
    )


class _Axes:
    """Places of values on a drawing.

    Args:
        ends: of the horizontal axis.
        most: bytes that the vertical one, which begins at zero, must hold.
    """

    def __init__(self, ends: tuple[float, float], most: int) -> None:
        self._low, high = ends
        self._span = (high - self._low) or 1
        self._step = _choose_grid_step(most)
        self._top = self._step * max(1, -(-most // self._step))

    def x(self, value: float) -> float:
        return round(_LEFT + (value - self._low) / self._span * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, size: float) -> float:
        return round(_HEIGHT - _BOTTOM - size / self._top * (_HEIGHT - _TOP - _BOTTOM), 1)

    def grid(self) -> str:
        found = []
        for size in range(0, self._top + 1, self._step):
            place = self.y(size)
            found.append(f'<path class="grid" d="M{_LEFT} {place}H{_WIDTH - _RIGHT}"/>')
            label = format_bytes(size).replace(".0 ", " ")
            found.append(f'<text class="tick" x="{_LEFT - 8}" y="{place + 4}" text-anchor="end">{label}</text>')
        return "".join(found)

    @staticmethod
    def names(across: str, up: str) -> str:
        """What the axes show."""
        middle = (_TOP + _HEIGHT - _BOTTOM) // 2
        return (
            f'<text class="tick" x="{(_LEFT + _WIDTH - _RIGHT) // 2}" y="{_HEIGHT - 6}" text-anchor="middle">{across}</text>'
            f'<text class="tick" x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">{up}</text>'
        )


def _choose_grid_step(most: int) -> int:
    """Bytes between lines of the grid: a power of two, so that four to eight lines are drawn."""
    step = 1
    while most / step > 8:
        step *= 2
    return step


def _draw_timeline(timeline: Mapping[str, Any]) -> tuple[str, str]:
    """Areas on top of each other, the steadiest at the foot."""
    places: Sequence[int] = timeline["places"]
    sizes: Mapping[str, Sequence[int]] = timeline["sizes"]
    if not places:
        return "", ""
    totals = [sum(column) for column in zip(*sizes.values())]
    axes = _Axes((places[0], places[-1]), max(totals))
    across = [axes.x(place) for place in places]
    floor, areas = [0] * len(places), []
    for index, (kind, row) in enumerate(sizes.items()):
        roof = [below + size for below, size in zip(floor, row)]
        upper = "L".join(f"{x} {axes.y(size)}" for x, size in zip(across, roof))
        lower = "L".join(f"{x} {axes.y(size)}" for x, size in zip(reversed(across), reversed(floor)))
        title = f"<title>{escape(kind)}</title>"
        areas.append(f'<path class="c{looks.colour(index)}" style="{_AREA}" d="M{upper}L{lower}Z">{title}</path>')
        floor = roof
    marks = "".join(_draw_phase(phase, axes.x(first)) for phase, first in timeline["phases"] if phase not in _UNSAID)
    keys = "".join(f'<span class="key">{swatch(index)}{escape(kind)}</span>' for index, kind in enumerate(sizes))
    names = axes.names("requests for memory, in their order", "tensors")
    return f'<span class="keys">{keys}</span>', axes.grid() + "".join(areas) + marks + names


_UNSAID = ("set-up", "end")


def _draw_phase(phase: str, place: float) -> str:
    return (
        f'<path class="axis" d="M{place} {_TOP - 12}V{_HEIGHT - _BOTTOM}"/>'
        f'<text class="tick" x="{place + 4}" y="{_TOP - 4}">{escape(phase)}</text>'
    )


def _draw_by_batch(found: Mapping[str, Any]) -> tuple[str, str]:
    """What the process takes at most, the budget, and the largest batch that stays within it."""
    points: Sequence[Sequence[int]] = found["by_batch"]
    budget = found["budget"]
    most = max([size for _, size in points] + ([budget] if budget is not None else []))
    axes = _Axes((0, points[-1][0]), most)
    line = "L".join(f"{axes.x(batch)} {axes.y(size)}" for batch, size in points)
    parts = [
        axes.grid(),
        axes.names("samples in a batch", "in use on the device"),
        f'<path class="line c0" d="M{line}"/>',
    ]
    stride = max(1, -(-points[-1][0] // 12))
    for batch in range(points[-1][0], 0, -stride):
        parts.append(
            f'<text class="tick" x="{axes.x(batch)}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{batch}</text>'
        )
    if budget is not None:
        place = axes.y(budget)
        parts.append(f'<path class="line c1" stroke-dasharray="7 3" d="M{_LEFT} {place}H{_WIDTH - _RIGHT}"/>')
    largest = found["largest_batch"]
    if largest:
        parts.append(f'<path class="axis" d="M{axes.x(largest)} {_TOP}V{_HEIGHT - _BOTTOM}"/>')
        parts.append(f'<text class="tick" x="{axes.x(largest) + 4}" y="{_TOP + 8}">largest: {largest}</text>')
    keys = f'<span class="key">{swatch(0)}at most in use</span><span class="key">{swatch(1)}budget</span>'
    return f'<span class="keys">{keys}</span>', "".join(parts)


def _render_split(found: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{escape(kind)}</td><td>{format_bytes(size)}</td><td>{size / max(1, found['allocated']):.0%}</td></tr>"
        for kind, size in found["split"].items()
    )
    where = f'<p class="about">asked for at {escape(found["peak_line"])}</p>' if found["peak_line"] else ""
    return (
        f"<section><h2>At the peak: {escape(found['peak'])}</h2>{where}"
        f'<div class="card scroll"><table><tbody>{rows}</tbody></table></div></section>'
    )


def _render_notes(found: Mapping[str, Any]) -> str:
    from headway.version import __version__

    notes = "".join(f'<p class="note warn">{escape(caveat)}</p>' for caveat in found["caveats"])
    made = f"{found['num_traces']} step(s) traced in {found['seconds']:.1f} s by Headway {__version__}; nothing was computed."
    return f"{notes}<footer>{escape(made)}</footer>"
