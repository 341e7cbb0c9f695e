"""
chart.py: the picture that README.md shows, from the lines of the table.

Written by hand, so that it needs no library and is the same wherever it is made.
"""
from xml.sax.saxutils import escape

WIDTH = 960
HEIGHT = 430
COLOURS = {"obix": "#1a66c9", "PgQ": "#8fa3b8", "pgmq": "#c3ccd6", "notify": "#e0a03a", "keyset": "#c3ccd6"}
NAMES = {"obix": "obix", "PgQ": "PgQ", "pgmq": "pgmq-like", "notify": "NOTIFY trigger"}
INK = "#24292f"
FAINT = "#6e7781"

DRAINS = [("drain read", "obix.read", "obix"), ("drain fetch", "obix.fetch and ack", "obix"),
          ("drain PgQ", "PgQ, by cursor", "PgQ"), ("drain keyset", "SELECT, keyset", "keyset"),
          ("drain pgmq", "pgmq-like, read and delete", "pgmq")]
WAKES = [("wake 50 0", "median"), ("wake 99 0", "99th percentile"), ("wake 50 8", "median, 8 publishers"),
         ("wake 99 8", "99th percentile, 8 publishers")]


class Picture:
    """SVG elements, one after the other."""

    def __init__(self):
        self.elements = []

    def rectangle(self, x, y, width, height, colour):
        self.elements.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}" rx="1.5"/>')

    def line(self, x1, y1, x2, y2, dashed=False):
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.elements.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{FAINT}"{dash}/>')

    def text(self, x, y, text, size=12, anchor="start", colour=INK, bold=False):
        weight = ' font-weight="bold"' if bold else ""
        self.elements.append(f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
                             f'fill="{colour}"{weight}>{escape(text)}</text>')

    def title(self, x, title, subtitle):
        self.text(x, 34, title, 15, bold=True)
        self.text(x, 52, subtitle, 12, colour=FAINT)

    def finish(self):
        body = "\n".join(self.elements)
        return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
                f'font-family="DejaVu Sans, Verdana, sans-serif">\n<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>\n'
                f"{body}\n</svg>\n")


def publish_panel(picture, values, x, width):
    """Groups of upright bars: throughput of publishers, relative to a plain table."""
    series = [name for name in NAMES if f"publish {name} 8" in values]
    base, full = 330, 240
    top = max(1.1, *(values[f"publish {name} {clients}"].value for name in series for clients in (1, 8, 16)))
    picture.title(x, "Publishing", "events a second, relative to a plain table; more is better")
    for group, clients in enumerate((1, 8, 16)):
        left = x + group * width / 3
        bar = (width / 3 - 18) / len(series)
        for n, name in enumerate(series):
            value = values[f"publish {name} {clients}"].value
            height = full * value / top
            picture.rectangle(left + n * bar, base - height, bar - 3, height, COLOURS[name])
            inside = height > 25
            picture.text(left + n * bar + (bar - 3) / 2, base - height + (14 if inside else -5), f"{value:.2f}", 10, "middle",
                         "#ffffff" if inside and name == "obix" else INK)
        picture.text(left + (width / 3 - 18) / 2, base + 17, f"{clients} client" + "s" * (clients > 1), 12, "middle")
    picture.line(x, base, x + width - 15, base)
    picture.line(x, base - full / top, x + width - 15, base - full / top, dashed=True)
    picture.text(x + width - 15, base - full / top - 5, "plain table", 10, "end", FAINT)
    for n, name in enumerate(series):
        left = x + n * width / len(series)
        picture.rectangle(left, base + 34, 11, 11, COLOURS[name])
        picture.text(left + 16, base + 44, NAMES[name], 11)


def bar(picture, x, y, length, label, name):
    """A level bar and its value."""
    picture.rectangle(x, y, max(2, length), 13, COLOURS[name])
    picture.text(x + max(2, length) + 5, y + 11, label, 11)


def drain_panel(picture, values, x, width):
    """Level bars: how long it takes to read many events."""
    rows = [(values[key].value, label, name) for key, label, name in DRAINS if key in values]
    top = max(value for value, _, _ in rows)
    picture.title(x, "Reading 596,371 events", "time, relative to COPY out; less is better")
    for n, (value, label, name) in enumerate(rows):
        picture.text(x, 84 + 48 * n, label, 11)
        bar(picture, x, 90 + 48 * n, width * value / top, f"{value:.2f}", name)


def wake_panel(picture, values, x, width):
    """Pairs of level bars: how soon somebody who waits has an event."""
    top = max(max(values[key].upper, values[key].lower) for key, _ in WAKES)
    picture.title(x, "Commit to rows in hand", "microseconds; less is better")
    for n, (key, label) in enumerate(WAKES):
        picture.text(x, 84 + 64 * n, label, 11)
        for m, (value, name) in enumerate(((values[key].upper, "obix"), (values[key].lower, "notify"))):
            bar(picture, x, 90 + 64 * n + 17 * m, width * value / top, f"{value:,.0f}", name)


def draw(lines, where):
    """The chart as SVG, or None if something it needs was not measured."""
    values = {line.key: line for line in lines if line.key and line.pairs > 0}
    needed = [f"publish obix {clients}" for clients in (1, 8, 16)] + ["drain read", "drain fetch"] + [key for key, _ in WAKES]
    if any(key not in values for key in needed):
        return None
    picture = Picture()
    publish_panel(picture, values, 30, 390)
    drain_panel(picture, values, 440, 190)
    wake_panel(picture, values, 710, 180)
    picture.text(30, HEIGHT - 14, f"./dev bench all: medians of pairs that took turns in one run; {where}", 10, colour=FAINT)
    return picture.finish()
