"""The dashboards without Grafana: one HTML page of charts, drawn from a Prometheus server by the same queries.

python -m paddlewheel.deploy.monitoring.preview --prometheus http://127.0.0.1:9090 --job NAME [--minutes 15] PAGE.html
"""

from __future__ import annotations

import argparse
import html
import json
import math
import re
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddlewheel.deploy.monitoring.dashboards import DASHBOARDS, STATE_COLOURS, Dashboard, Panel

_COLOURS = ("#3b82c4", "#e0862b", "#2b9a66", "#8e4ec6", "#c2344b", "#6b7280", "#0f766e", "#b45309")
_NUM_STEPS = 120
_STYLE = """
body { margin: 0 auto; padding: 16px; max-width: 1280px; font: 13px/1.4 system-ui, "DejaVu Sans", sans-serif;
  background: #f4f5f7; color: #1d2430; }
h1 { font-size: 18px; margin: 18px 0 8px; } h2 { font-size: 13px; margin: 0 0 4px; color: #5c6675; font-weight: 500; }
.grid { display: grid; grid-template-columns: repeat(24, 1fr); gap: 10px; }
.panel { background: #fff; border: 1px solid #d9dee6; border-radius: 6px; padding: 8px 10px; min-width: 0; }
.stat b { font-size: 22px; font-variant-numeric: tabular-nums; }
svg { display: block; width: 100%; height: 170px; } text { font-size: 11px; fill: #5c6675; }
.legend { color: #5c6675; font-size: 11.5px; }
.legend i { display: inline-block; width: 9px; height: 9px; margin: 0 4px 0 10px; }
"""


@dataclass(frozen=True)
class Curve:
    """One series of an answer."""

    legend: str
    points: tuple[tuple[float, float], ...]


class Prometheus:
    """The two calls of Prometheus's HTTP interface that are needed here."""

    def __init__(self, address: str) -> None:
        self._address = address.rstrip("/")
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get(self, path: str, **parameters: str | float) -> Any:
        """`data` of the answer. Raises OSError; RuntimeError for a query that Prometheus refuses."""
        url = f"{self._address}{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with self._opener.open(url, timeout=10) as answer:
                said = json.load(answer)
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path} {parameters}: {error.read().decode(errors='replace')}") from error
        return said["data"]

    def range(self, panel: Panel, job: str, start: float, end: float, rate_interval: str) -> list[Curve]:
        """The panel's curves."""
        step = _step(start, end)
        curves = []
        for query in panel.queries_for(job, rate_interval):
            data = self.get("/api/v1/query_range", query=query.expression, start=start, end=end, step=step)
            for result in data["result"]:
                points = [(float(at), float(value)) for at, value in result["values"]]
                finite = tuple(point for point in points if math.isfinite(point[1]))
                curves.append(Curve(_legend(query.legend, result["metric"]), finite))
        return curves


def render(
    prometheus: Prometheus,
    job: str,
    start: float,
    end: float,
    dashboards: Iterable[Dashboard] = DASHBOARDS,
    rate_interval: str = "1m",
) -> str:
    """The page. Raises OSError or RuntimeError when Prometheus does not answer a query."""
    parts = [f"<!doctype html><meta charset=utf-8><title>{html.escape(job)}</title><style>{_STYLE}</style>"]
    for dashboard in dashboards:
        parts.append(f"<h1>{html.escape(dashboard.title)}: {html.escape(job)}</h1><div class=grid>")
        for panel in dashboard.panels:
            curves = prometheus.range(panel, job, start, end, rate_interval)
            if panel.kind == "stat":
                body = _stat(panel, curves)
            elif panel.kind == "state-timeline":
                body = _timeline(panel, curves, start, end)
            else:
                body = _chart(panel, curves, start, end)
            parts.append(
                f'<div class="panel {panel.kind}" style="grid-column: span {panel.width}">'
                f"<h2>{html.escape(panel.title)}</h2>{body}</div>"
            )
        parts.append("</div>")
    return "\n".join(parts) + "\n"


def _legend(template: str, labels: dict[str, str]) -> str:
    if not template:
        return ", ".join(f"{k}={v}" for k, v in labels.items() if k != "__name__") or "value"
    return re.sub(r"{{\s*(\w+)\s*}}", lambda match: labels.get(match.group(1), ""), template)


def _stat(panel: Panel, curves: list[Curve]) -> str:
    last = [curve.points[-1][1] for curve in curves if curve.points]
    return f"<b>{html.escape(_in_unit(last[0], panel.unit)) if last else 'no data'}</b>"


def _chart(panel: Panel, curves: list[Curve], start: float, end: float) -> str:
    width, height, left, bottom, top = 560.0, 170.0, 58.0, 18.0, 6.0
    curves = sorted((curve for curve in curves if curve.points), key=lambda curve: curve.legend)
    if not curves:
        return "<svg viewBox='0 0 560 170'><text x=250 y=85>no data</text></svg>"
    drawn = _stack(curves) if panel.stacked else curves
    values = [value for curve in drawn for _, value in curve.points]
    low, high = min(values), max(values)
    if panel.stacked or 0 <= low < 0.4 * high:
        low = 0.0
    if high - low < 1e-12:
        low, high = (0.0, high * 1.2) if high > 0 else (low - 1, high + 1)
    high += 0.05 * (high - low)

    def place(at: float, value: float) -> str:
        x = left + (at - start) / (end - start) * (width - left - 8)
        y = top + (1 - (value - low) / (high - low)) * (height - top - bottom)
        return f"{x:.1f},{y:.1f}"

    parts = [f'<svg viewBox="0 0 {width:.0f} {height:.0f}" preserveAspectRatio="none">']
    size = 1024 ** _power(high) if panel.unit in {"bytes", "Bps"} else 1
    for value in (size * tick for tick in round_ticks(low / size, high / size)):
        y = place(start, value).split(",")[1]
        parts.append(f'<line x1={left} x2={width - 8} y1={y} y2={y} stroke="#d9dee6" />')
        parts.append(f"<text x={left - 6} y={float(y) + 4:.1f} text-anchor=end>{_in_unit(value, panel.unit)}</text>")
    for i, at in ((0, start), (1, end)):
        anchor = "end" if i else "start"
        clock = time.strftime("%H:%M:%S", time.gmtime(at))
        parts.append(f"<text x={left if not i else width - 8} y={height - 4} text-anchor={anchor}>{clock}</text>")
    for number, curve in reversed(list(enumerate(drawn))):
        colour = _COLOURS[number % len(_COLOURS)]
        line = " ".join(place(at, value) for at, value in curve.points)
        if panel.stacked:
            foot = f"{place(curve.points[-1][0], low)} {place(curve.points[0][0], low)}"
            parts.append(f'<polygon points="{line} {foot}" fill="{colour}" stroke="#fff" stroke-width="0.6" />')
        elif len(curve.points) == 1:
            x, y = line.split(",")
            parts.append(f'<circle cx={x} cy={y} r=2.5 fill="{colour}" />')
        else:
            for piece in _pieces(curve.points, 2.5 * _step(start, end)):
                line = " ".join(place(at, value) for at, value in piece)
                parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.6" />')
    names = "".join(
        f'<i style="background:{_COLOURS[i % len(_COLOURS)]}"></i>{html.escape(curve.legend)}'
        for i, curve in enumerate(curves[:12])
    )
    return "".join(parts) + f"</svg><div class=legend>{names}</div>"


def _step(start: float, end: float) -> float:
    """Seconds between the points of a curve."""
    return max((end - start) / _NUM_STEPS, 1.0)


def round_ticks(low: float, high: float) -> list[float]:
    """Multiples of 1, 2, 2.5 or 5 times a power of ten that lie between two numbers: two to six of them."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next((factor for factor in (1, 2, 2.5, 5) if factor * power >= rough * (1 - 1e-9)), 10)
    return [float(f"{i * step:.12g}") for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _timeline(panel: Panel, curves: list[Curve], start: float, end: float) -> str:
    """A band for each curve: which state it was in when."""
    left, width, bottom = 8.0, 544.0, 140.0
    gap = 2.5 * _step(start, end)
    tall = bottom / max(1, len(curves))
    parts = ['<svg viewBox="0 0 560 170" preserveAspectRatio="none">']
    seen = set()
    for row, curve in enumerate(curves):
        for state, begin, over in _spans(curve.points, gap):
            number = min(max(int(state), 0), len(panel.states) - 1)
            seen.add(number)
            x = left + (begin - start) / (end - start) * width
            wide = max(1.0, (over - begin) / (end - start) * width)
            parts.append(
                f"<rect x={x:.1f} y={6 + row * tall:.1f} width={wide:.1f} height={tall - 6:.1f} "
                f'fill="{_state_colour(number)}"><title>{html.escape(panel.states[number])}</title></rect>'
            )
    for x, anchor, at in ((left, "start", start), (left + width, "end", end)):
        clock = time.strftime("%H:%M:%S", time.gmtime(at))
        parts.append(f"<text x={x} y=166 text-anchor={anchor}>{clock}</text>")
    names = "".join(
        f'<i style="background:{_state_colour(number)}"></i>{html.escape(panel.states[number])}'
        for number in sorted(seen)
    )
    return "".join(parts) + f"</svg><div class=legend>{names}</div>"


def _state_colour(number: int) -> str:
    return STATE_COLOURS[number % len(STATE_COLOURS)]


def _spans(points: tuple[tuple[float, float], ...], gap: float) -> list[tuple[float, float, float]]:
    """(value, from, to) of every stretch in which the value stays; it lasts until the next, unless that is too late."""
    spans: list[tuple[float, float, float]] = []
    for at, value in points:
        before = spans[-1] if spans and at - spans[-1][2] <= gap else None
        if before is not None:
            spans[-1] = (before[0], before[1], at)
        if before is None or before[0] != value:
            spans.append((value, at, at))
    return spans


def _pieces(points: tuple[tuple[float, float], ...], gap: float) -> list[list[tuple[float, float]]]:
    """The curve in pieces: where nothing was measured for longer than `gap` seconds, nothing is drawn."""
    pieces: list[list[tuple[float, float]]] = []
    for point in points:
        if not pieces or point[0] - pieces[-1][-1][0] > gap:
            pieces.append([])
        pieces[-1].append(point)
    # A point alone would be invisible: a short line instead.
    return [piece if len(piece) > 1 else [piece[0], (piece[0][0] + gap / 4, piece[0][1])] for piece in pieces]


def _stack(curves: list[Curve]) -> list[Curve]:
    base: dict[float, float] = {}
    stacked = []
    for curve in curves:
        points = tuple((at, base.get(at, 0.0) + value) for at, value in curve.points)
        base.update(points)
        stacked.append(Curve(curve.legend, points))
    return stacked


def _power(num_bytes: float) -> int:
    """Of 1024: in which unit a number of bytes is told."""
    return min(4, int(math.log(abs(num_bytes) * 1.024, 1024))) if abs(num_bytes) >= 1 else 0


def _in_unit(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{100 * value:.0f} %"
    if unit == "s":
        return f"{1000 * value:.3g} ms" if 0 < abs(value) < 1 else f"{value:.3g} s"
    if unit in {"bytes", "Bps"}:
        power = _power(value)
        return f"{value / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}{'/s' if unit == 'Bps' else ''}"
    if unit == "none":
        return f"{value:.4g}"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m paddlewheel.deploy.monitoring.preview", description=__doc__)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", help="address of the server")
    parser.add_argument("--job", required=True, help="job_name")
    parser.add_argument("--minutes", type=float, default=15.0, help="how far back")
    parser.add_argument("--rate-interval", default="1m", help="window of rates; at least four scrapes")
    parser.add_argument("--only", choices=[dashboard.name for dashboard in DASHBOARDS], help="one dashboard")
    parser.add_argument("page", type=Path, help="file to write")
    given = parser.parse_args()
    chosen = [dashboard for dashboard in DASHBOARDS if given.only in {None, dashboard.name}]
    end = time.time()
    page = render(Prometheus(given.prometheus), given.job, end - 60 * given.minutes, end, chosen, given.rate_interval)
    given.page.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
