# Gives figures of matplotlib a form with their data, which ipykernel publishes next to the picture.

import math
import sys

from IPython import get_ipython
from IPython.core.formatters import JSONFormatter
from traitlets import Unicode

MIME = "application/vnd.doze.chart+json"
MAX_SERIES = 100  # of all axes of a figure
MAX_POINTS = 5_000  # of all series of a figure


class ChartFormatter(JSONFormatter):
    # A function for the type of figures would be removed when the code selects a format of pictures.
    format_type = Unicode(MIME)

    def __call__(self, value):
        figures = sys.modules.get("matplotlib.figure")
        if figures is None or not isinstance(value, figures.Figure):
            return None
        try:
            return chart(value)
        except Exception:  # the picture is enough
            return None


def plain(value):
    """Returns a value of JSON: a number, text or None."""
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if hasattr(value, "item"):  # of numpy
        value = value.item()
    if isinstance(value, (bool, int, str)):
        return value
    try:
        value = float(value)
    except (TypeError, ValueError):
        return str(value)
    return value if math.isfinite(value) else None


def label(artist):
    """Returns the label that the code has set, or None."""
    text = str(artist.get_label() or "")
    return None if not text or text.startswith("_") else text


def positions(axis):
    """Returns a function that returns what the code has placed at a position: a category, a date or a number."""
    from matplotlib.category import UnitData
    from matplotlib.dates import num2date
    from matplotlib.ticker import FixedLocator, ScalarFormatter

    converter = axis.get_converter() if hasattr(axis, "get_converter") else axis.converter
    if "Date" in type(converter).__name__:
        return lambda at: num2date(at).replace(tzinfo=None)
    names = {}
    if isinstance(axis.units, UnitData):
        names = {at: text for text, at in axis.units._mapping.items()}
    elif isinstance(axis.get_major_locator(), FixedLocator) and not isinstance(axis.get_major_formatter(), ScalarFormatter):
        names = {at: axis.get_major_formatter()(at, i) for i, at in enumerate(axis.get_majorticklocs())}
    return lambda at: names.get(at, at)


def lines(ax):
    for line in ax.lines:
        xs, ys = line.get_xdata(orig=True), line.get_ydata(orig=True)
        if line.get_transform().contains_branch(ax.transData) and len(xs) == len(ys):
            yield "line", label(line), zip(xs, ys)


def scatters(ax):
    from matplotlib.collections import PathCollection

    x_at, y_at = positions(ax.xaxis), positions(ax.yaxis)
    for group in ax.collections:
        if isinstance(group, PathCollection):
            yield "scatter", label(group), ((x_at(x), y_at(y)) for x, y in group.get_offsets())


def bars(ax):
    from matplotlib.container import BarContainer

    x_at, y_at = positions(ax.xaxis), positions(ax.yaxis)
    for group in ax.containers:
        if not isinstance(group, BarContainer):
            continue
        if group.orientation == "horizontal":
            points = ((p.get_width(), y_at(p.get_y() + p.get_height() / 2)) for p in group.patches)
        else:
            points = ((x_at(p.get_x() + p.get_width() / 2), p.get_height()) for p in group.patches)
        yield "bar", label(group), points


def pies(ax):
    from matplotlib.patches import Wedge

    wedges = [p for p in ax.patches if isinstance(p, Wedge)]
    if wedges:
        yield "pie", None, ((label(w), abs(w.theta2 - w.theta1) / 360) for w in wedges)


def chart(figure):
    series_left, points_left, truncated = MAX_SERIES, MAX_POINTS, False
    shown = []
    for ax in figure.axes:
        series = []
        for source in (lines, scatters, bars, pies):
            for kind, name, points in source(ax):
                points = [[plain(x), plain(y)] for _, (x, y) in zip(range(points_left + 1), points)]
                if series_left == 0 or len(points) > points_left:
                    truncated = True
                    points = points[:points_left]
                if series_left == 0:
                    break
                series.append({"kind": kind, "label": name, "points": points})
                series_left -= 1
                points_left -= len(points)
        shown.append({
            "title": ax.get_title(), "x_label": ax.get_xlabel(), "y_label": ax.get_ylabel(),
            "x_scale": ax.get_xscale(), "y_scale": ax.get_yscale(), "series": series,
        })
    if not any(ax["series"] for ax in shown):
        return None
    title = figure._suptitle.get_text() if figure._suptitle else ""
    return {"title": title, "axes": shown, "truncated": truncated}


display_formatter = get_ipython().display_formatter
display_formatter.formatters[MIME] = ChartFormatter(parent=display_formatter)
