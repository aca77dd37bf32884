"""Charts as inline SVG: 480 units wide, colours by the page's CSS classes, so that they follow light and dark."""

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH = 480
BAR, GAP = 22, 14


def bars(values: Mapping[str, float], unit: str, highlighted: str, label: str) -> str:
    """One horizontal bar per entry with its value at the end; `highlighted` stands out."""
    most = max(values.values(), default=1.0) or 1.0
    rows = []
    for index, (name, value) in enumerate(values.items()):
        y = index * (BAR + GAP)
        length = max(2.0, (WIDTH - 210) * value / most)
        kind = "ours" if name == highlighted else "other"
        rows.append(
            f'<text class="label" x="96" y="{y + 16}" text-anchor="end">{escape(name)}</text>'
            f'<rect class="{kind}" x="104" y="{y}" width="{length:.1f}" height="{BAR}" rx="3"/>'
            f'<text class="value" x="{104 + length + 8:.1f}" y="{y + 16}">{number(value)} {unit}</text>'
        )
    return _svg(len(values) * (BAR + GAP), "".join(rows), label)


def by_layer(rows: Sequence[tuple[str, float, bool]], label: str) -> str:
    """A dot per (name, dB, is an output), in the model's order, over a line from the axis; the y axis starts at 0."""
    finite = [value for _, value, _ in rows if math.isfinite(value)]
    top = max(10.0, math.ceil(max(finite, default=10.0) / 10) * 10)
    left, top_margin, height = 58, 14, 226
    plot_height, step = height - 26 - top_margin, (WIDTH - left - 16) / max(len(rows), 1)

    def y_of(value: float) -> float:
        return top_margin + plot_height * (1 - min(max(value, 0.0), top) / top)

    parts = []
    for tick in range(0, int(top) + 1, 10 if top <= 60 else 20):
        y = y_of(tick)
        parts.append(f'<line class="grid" x1="{left}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="label" x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick}</text>')
    for index, (name, value, is_output) in enumerate(rows):
        x, y = left + step * (index + 0.5), y_of(value)
        kind = "other" if is_output else "ours"
        shown = f"{value:.1f} dB".replace("-inf dB", "no signal").replace("inf dB", "equal")
        parts.append(
            f'<line class="stem" x1="{x:.1f}" x2="{x:.1f}" y1="{y_of(0):.1f}" y2="{y:.1f}"/>'
            f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{min(5.0, max(2.0, step / 3)):.1f}">'
            f"<title>{escape(name)}: {shown}</title></circle>"
        )
    parts.append(f'<text class="label" x="{left}" y="{height - 6}">first</text>')
    parts.append(f'<text class="label" x="{WIDTH / 2}" y="{height - 6}" text-anchor="middle">layers, in order</text>')
    parts.append(f'<text class="label" x="{WIDTH - 8}" y="{height - 6}" text-anchor="end">outputs</text>')
    parts.append(_upright(12, top_margin + plot_height / 2, "SQNR, dB"))
    return _svg(height, "".join(parts), label)


def roofline(
    bandwidth: float, tflops: Mapping[str, float], points: Sequence[tuple[str, float, float]], label: str
) -> str:
    """Operations per byte against attainable operations per second, both logarithmic; `points`: (name, x, y)."""
    left, right, top, height = 76, 70, 14, 262
    floor = height - 46
    peak = max(tflops.values()) * 1e12
    xs = [x for _, x, _ in points if x > 0]
    x_low = 10 ** math.floor(math.log10(min([*xs, 1.0])))
    x_high = 10 ** math.ceil(math.log10(max([*xs, 4 * peak / bandwidth])))
    y_high = 10 ** math.ceil(math.log10(peak))
    y_low = 10 ** math.floor(math.log10(bandwidth * x_low))

    def at(x: float, y: float) -> tuple[float, float]:
        across = math.log(x / x_low) / math.log(x_high / x_low)
        up = math.log(max(y, y_low) / y_low) / math.log(y_high / y_low)
        return left + across * (WIDTH - left - right), floor - up * (floor - top)

    parts = []
    for exponent in range(round(math.log10(y_low)), round(math.log10(y_high)) + 1):
        _, y = at(x_low, 10.0**exponent)
        parts.append(f'<line class="grid" x1="{left}" x2="{WIDTH - right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="label" x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{_ops(10.0**exponent)}</text>'
        )
    for exponent in range(round(math.log10(x_low)), round(math.log10(x_high)) + 1):
        x, _ = at(10.0**exponent, y_low)
        parts.append(f'<text class="label" x="{x:.1f}" y="{floor + 16}" text-anchor="middle">{10.0**exponent:g}</text>')
    middle = (left + WIDTH - right) / 2
    parts.append(f'<text class="label" x="{middle}" y="{height - 6}" text-anchor="middle">operations per byte</text>')
    parts.append(_upright(14, (floor + top) / 2, "operations per second"))
    above = -math.inf
    for name, value in sorted(tflops.items(), key=lambda item: -item[1]):
        ridge = value * 1e12 / bandwidth
        corner, end = at(ridge, value * 1e12), at(x_high, value * 1e12)
        start = at(x_low, bandwidth * x_low)
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (start, corner, end))
        parts.append(f'<polyline class="roof" points="{line}"/>')
        # Peaks that lie close together have their names apart.
        above = max(end[1] + 4, above + 18)
        parts.append(f'<text class="label" x="{end[0] + 5:.1f}" y="{above:.1f}">{escape(name.upper())}</text>')
    for name, x_value, y_value in points:
        x, y = at(x_value, y_value)
        parts.append(f'<circle class="ours" cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{escape(name)}</title></circle>')
    return _svg(height, "".join(parts), label)


def _upright(x: float, y: float, text: str) -> str:
    """The title of a vertical axis, read from below, with its middle at (x, y)."""
    turned = f'transform="rotate(-90 {x:g} {y:g})"'
    return f'<text class="label" x="{x:g}" y="{y:g}" text-anchor="middle" {turned}>{escape(text)}</text>'


def number(value: float) -> str:
    """Three significant digits, thousands separated."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _ops(value: float) -> str:
    for size, suffix in ((1e15, "P"), (1e12, "T"), (1e9, "G")):
        if value >= size:
            return f"{value / size:g} {suffix}"
    return f"{value:g}"


def _svg(height: float, body: str, label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(label)}" '
        f'xmlns="http://www.w3.org/2000/svg"><title>{escape(label)}</title>{body}</svg>'
    )
