"""A small drawing surface: fixed-width text, boxes, lines and arrows, as an SVG in the colours of the page."""

from __future__ import annotations

from html import escape

FONT = 12  # pixels
ADVANCE = 0.61 * FONT  # the width of a character, rounded up: fixed-width fonts have 0.55 to 0.602 of their height
LINE = 16  # the height of a line of text
MONO = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace"
COLOURS = {  # the page may set these variables; the defaults have enough contrast on white and on black
    "forward": "var(--picture-forward, #3b82c4)",
    "backward": "var(--picture-backward, #d2691e)",
    "plain": "currentColor",
}


def width(text: str) -> float:
    """The width of a text in pixels."""
    return len(text) * ADVANCE


class Canvas:
    """Elements of a picture `width` wide; the height follows from what is drawn."""

    def __init__(self, width: float) -> None:
        self.width, self.height = width, 0.0
        self.elements: list[str] = []

    def text(
        self, x: float, y: float, text: str, anchor: str = "start", bold: bool = False, size: float = FONT
    ) -> None:
        """y: of the baseline."""
        weight = ' font-weight="bold"' if bold else ""
        scale = "" if size == FONT else f' font-size="{size}"'
        place = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self._add(f'<text x="{x:.1f}" y="{y:.1f}"{place}{weight}{scale}>{escape(text)}</text>', y + 4)

    def box(self, x: float, y: float, width: float, height: float, fill: float = 0.06, dashed: bool = False) -> None:
        """fill: the opacity of the inside."""
        dash = ' stroke-dasharray="3 3"' if dashed else ""
        self._add(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="4" fill="currentColor" '
            f'fill-opacity="{fill}" stroke="currentColor" stroke-opacity="0.45"{dash}/>',
            y + height,
        )

    def line(
        self,
        points: list[tuple[float, float]],
        colour: str = "plain",
        head: bool = False,
        dash: str = "",
        faint: bool = False,
    ) -> None:
        """A line through the points; head: with an arrow head at the last; faint: like the border of a box."""
        path = "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        if head:
            (x0, y0), (x, y) = points[-2:]
            length = abs(x - x0) + abs(y - y0)  # one of them is 0
            back, up = 6 * (x - x0) / length, 6 * (y - y0) / length
            side, rise = 3.5 * abs(y - y0) / length, 3.5 * abs(x - x0) / length
            path += f" M{x - back - side:.1f} {y - up - rise:.1f} L{x:.1f} {y:.1f}"
            path += f" L{x - back + side:.1f} {y - up + rise:.1f}"
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        dashes += ' stroke-opacity="0.45"' if faint else ""
        self._add(
            f'<path d="{path}" fill="none" stroke-width="{1 if faint else 1.6}"{dashes} '
            f'style="stroke:{COLOURS[colour]}"/>',
            max(y for _, y in points),
        )

    def plus(self, x: float, y: float, colour: str) -> None:
        """A circle with a plus."""
        self._add(
            f'<path d="M{x - 6:.1f} {y:.1f} a6 6 0 1 0 12 0 a6 6 0 1 0 -12 0 '
            f'M{x - 4:.1f} {y:.1f} h8 M{x:.1f} {y - 4:.1f} v8" '
            f'style="stroke:{COLOURS[colour]};fill:none" stroke-width="1.4"/>',
            y + 6,
        )

    def svg(self, title: str, description: str, name: str) -> str:
        """The picture. name: tells it from the other pictures of a page."""
        height = self.height + 6
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="picture" role="img" '
            f'aria-labelledby="{name}-title {name}-desc" '
            f'viewBox="0 0 {self.width:.0f} {height:.0f}" width="{self.width:.0f}" '
            f'style="max-width:100%;height:auto;display:block;margin:auto" font-family="{MONO}" font-size="{FONT}" '
            f'fill="currentColor"><title id="{name}-title">{escape(title)}</title>'
            f'<desc id="{name}-desc">{escape(description)}</desc>{"".join(self.elements)}</svg>'
        )

    def _add(self, element: str, bottom: float) -> None:
        self.elements.append(element)
        self.height = max(self.height, bottom)


def wrapped(text: str, width: float, size: float = FONT) -> list[str]:
    """The text in lines of at most this width, broken at spaces between parts that a no-break space does not join."""
    room, lines = int(width / (ADVANCE * size / FONT)), [""]
    for part in text.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(part) > room:
            lines.append(part)
        else:
            lines[-1] = f"{lines[-1]} {part}" if lines[-1] else part
    return [line.replace("\u00a0", " ") for line in lines]
