"""What a run has learnt, drawn: loss, evaluations, reliability, slices. PNG files and one HTML page that holds them.

Reads the `result.json` of a run folder. Needs matplotlib (extra `plot`).
"""

from __future__ import annotations

import base64
import html
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_INK, _MUTED, _GRID = "#1f2937", "#6b7280", "#e5e7eb"
_BLUE, _ORANGE, _GREEN = "#2563eb", "#d97706", "#059669"
_SLICES_DRAWN = 15
_ROWS_OF_A_BAND = 10
_FEW_DECADES = 10**3.2
"""Of a logarithmic axis: up to here the labels 1, 2 and 5 of every decade have room beside each other."""
_METRICS = {
    "auc": ("AUC", ".5f"),
    "weighted_auc": ("AUC, rows by weight", ".5f"),
    "gauc": ("AUC within groups (by rows)", ".5f"),
    "gauc_by_clicks": ("AUC within groups (by positives)", ".5f"),
    "logloss": ("logloss", ".5f"),
    "weighted_logloss": ("logloss, rows by weight", ".5f"),
    "normalised_entropy": ("normalised entropy", ".4f"),
    "calibration": ("calibration (predicted / observed)", ".4f"),
    "weighted_calibration": ("calibration, rows by weight", ".4f"),
    "calibration_error": ("calibration error", ".5f"),
}


class LearningReportError(ValueError):
    """A run folder holds nothing to draw, or matplotlib is not there."""


def write(run_dir: Path, out: Path) -> list[Path]:
    """Draws a run into `out`; returns the files, the HTML page first.

    Raises:
        LearningReportError: see there.
    """
    result = _result(run_dir)
    evaluation = result.get("eval") or {}
    if not evaluation and not result.get("curve", {}).get("loss"):
        raise LearningReportError(f"{run_dir}: the run has neither a loss curve nor an evaluation to draw")
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise LearningReportError(
            "drawing needs matplotlib: pip install 'paddlewheel[plot]' (or matplotlib into the same environment)"
        ) from error
    out.mkdir(parents=True, exist_ok=True)
    figures: list[tuple[str, str, Path]] = []
    with mpl.rc_context(_STYLE):
        if result.get("curve", {}).get("loss") or result.get("evaluations"):
            figures.append(("Training", _training_words(result), _draw_training(result, out / "training.png")))
        for label, report in _by_label(evaluation).items():
            if report.get("bands"):
                name = "reliability.png" if label is None else f"reliability-{_file_name(label)}.png"
                title = "Reliability" if label is None else f"Reliability of {label}"
                figures.append((title, _reliability_words(report), _draw_reliability(report, out / name)))
        for column, reports in (evaluation.get("slices") or {}).items():
            path = out / f"slices-{_file_name(column)}.png"
            words = f"AUC by value of {column}; the line is the AUC of all rows. A value with one class only has none."
            figures.append((f"By {column}", words, _draw_slices(column, reports, evaluation.get("auc"), path)))
    page = out / "report.html"
    page.write_text("\n".join(_page(run_dir, result, figures)), encoding="utf-8")
    return [page, *(path for _, _, path in figures)]


def _result(run_dir: Path) -> dict[str, Any]:
    path = run_dir / "result.json"
    try:
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["result"]
    except FileNotFoundError:
        raise LearningReportError(f"{run_dir}: no result.json; a run writes it at its end") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LearningReportError(f"{path} cannot be read: {error}") from error
    return result


def _by_label(evaluation: Mapping[str, Any]) -> dict[str | None, Mapping[str, Any]]:
    return {**evaluation["labels"]} if "labels" in evaluation else {None: evaluation}


# ------------------------------------------------------------------------------------------------------------ figures

_STYLE: Any = {
    "figure.figsize": (9.0, 4.2),
    "figure.dpi": 110,
    "figure.facecolor": "white",
    "font.size": 10,
    "text.color": _INK,
    "axes.edgecolor": _MUTED,
    "axes.labelcolor": _INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": _GRID,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
}


def _save(figure: Any, path: Path) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure.set_canvas(FigureCanvasAgg(figure))
    figure.savefig(path)
    return path


def _draw_training(result: Mapping[str, Any], path: Path) -> Path:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    evaluations = [*result.get("evaluations", ())]
    final = result.get("eval")
    if final:
        evaluations.append({"step": result.get("steps"), **final})
    figure = Figure(layout="constrained")
    left, right = figure.subplots(1, 2, sharex=True)
    curve = result.get("curve") or {}
    losses: Sequence[float] = curve.get("loss") or ()
    if losses:
        steps = [curve["first_step"] + (i + 1) * curve["stride"] - 1 for i in range(len(losses))]
        left.plot(steps, losses, color=_BLUE, alpha=0.25, linewidth=1)
        left.plot(steps, _smooth(losses), color=_BLUE, label="training loss (smoothed)")
    drawn = [e for e in evaluations if e.get("logloss") is not None]
    left.plot(
        [e["step"] for e in drawn], [e["logloss"] for e in drawn], "o-", color=_ORANGE, ms=5, label="evaluation logloss"
    )
    left.set(xlabel="step", ylabel="loss", title="Loss")
    left.legend(loc="upper right")
    drawn = [e for e in evaluations if e.get("auc") is not None]
    right.plot([e["step"] for e in drawn], [e["auc"] for e in drawn], "o-", color=_GREEN, ms=5, label="AUC")
    if any(e.get("gauc") is not None for e in evaluations):
        grouped = [e for e in evaluations if e.get("gauc") is not None]
        right.plot(
            [e["step"] for e in grouped],
            [e["gauc"] for e in grouped],
            "s--",
            color=_MUTED,
            ms=4,
            label="AUC within groups",
        )
    best = result.get("best") or {}
    if best.get("step") is not None:
        right.axvline(best["step"], color=_ORANGE, linewidth=1, linestyle=":", label=f"best: step {best['step']:,}")
    right.set(xlabel="step", ylabel="AUC", title="Evaluation")
    left.xaxis.set_major_locator(MaxNLocator(4, integer=True, steps=[1, 2, 5, 10]))
    left.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    if drawn:
        right.legend(loc="best")
    return _save(figure, path)


def _smooth(values: Sequence[float]) -> list[float]:
    """Moving mean over a fortieth of the curve, centred; shorter at the ends."""
    reach = max(1, len(values) // 80)
    return [
        sum(values[max(0, i - reach) : i + reach + 1]) / len(values[max(0, i - reach) : i + reach + 1])
        for i in range(len(values))
    ]


def _draw_reliability(report: Mapping[str, Any], path: Path) -> Path:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, StrMethodFormatter

    bands = report["bands"]
    told = [band for band in bands if band["rows"] >= _ROWS_OF_A_BAND] or bands
    figure = Figure(layout="constrained", figsize=(7.5, 5.4))
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    low, high = min(b["prediction"] for b in told) / 1.6, min(1.0, max(b["prediction"] for b in told) * 1.4)
    top.plot([low, high], [low, high], color=_MUTED, linewidth=1, linestyle="--", label="perfectly calibrated")
    seen = [band for band in told if band["positives"]]
    rates = [band["positives"] / band["rows"] for band in seen]
    intervals = [_wilson(band["positives"], band["rows"]) for band in seen]
    errors = [
        [rate - low for rate, (low, _) in zip(rates, intervals, strict=True)],
        [high - rate for rate, (_, high) in zip(rates, intervals, strict=True)],
    ]
    if seen:
        predictions = [band["prediction"] for band in seen]
        top.errorbar(
            predictions, rates, yerr=errors, fmt="o", color=_BLUE, ms=5, capsize=2, linewidth=1.2, label="95 % interval"
        )
    none = [band for band in told if not band["positives"]]
    if none:
        bounds = [_wilson(0, band["rows"])[1] for band in none]
        top.plot(
            [b["prediction"] for b in none],
            bounds,
            "v",
            color=_MUTED,
            ms=6,
            label="no positives: upper end of interval",
        )
    floor = min([low, *(low_end for low_end, _ in intervals if low_end > 0)])
    top.set(xscale="log", yscale="log", xlim=(low, high), ylim=(floor / 1.3, 1.3), ylabel="observed rate")
    top.legend(loc="lower right")
    # a band is half a unit of log-odds wide: its ends are the odds a quarter of a unit to either side
    ends = [[_shifted(b["prediction"], by) for by in (-0.22, 0.22)] for b in told]
    widths = [right - left for left, right in ends]
    bottom.bar(
        [left for left, _ in ends], [b["rows"] for b in told], width=widths, align="edge", color=_BLUE, alpha=0.35
    )
    bottom.set(xlabel="mean prediction of the band", ylabel="rows")
    for axis in (top.xaxis, top.yaxis, bottom.xaxis):
        lowest, highest = axis.get_view_interval()
        between = (1.0, 2.0, 5.0) if highest / lowest < _FEW_DECADES else (1.0,)
        axis.set_major_locator(LogLocator(subs=between, numticks=12))
        axis.set_major_formatter(FuncFormatter(lambda rate, _: f"{100 * rate:g} %"))
        axis.set_minor_formatter(NullFormatter())
    bottom.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    return _save(figure, path)


def _shifted(probability: float, log_odds: float) -> float:
    odds = probability / max(1e-12, 1 - probability) * math.exp(log_odds)
    return odds / (1 + odds)


def _wilson(successes: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """Confidence interval of a rate (Wilson, 1927)."""
    rate, weight = successes / total, z * z / total
    centre = (rate + weight / 2) / (1 + weight)
    half = z / (1 + weight) * math.sqrt(rate * (1 - rate) / total + weight / (4 * total))
    return max(0.0, min(rate, centre - half)), min(1.0, max(rate, centre + half))


def _draw_slices(column: str, reports: Sequence[Mapping[str, Any]], overall: float | None, path: Path) -> Path:
    from matplotlib.figure import Figure

    shown = list(reports[:_SLICES_DRAWN])[::-1]
    figure = Figure(layout="constrained", figsize=(9.0, 1.3 + 0.3 * max(3, len(shown))))
    axes = figure.subplots()
    names = [_short(report["value"]) for report in shown]
    values = [report["auc"] if report["auc"] is not None else math.nan for report in shown]
    axes.hlines(range(len(shown)), 0.5, values, color=_BLUE, alpha=0.35, linewidth=6)
    axes.plot(values, range(len(shown)), "o", color=_BLUE, ms=6)
    for place, report in enumerate(shown):
        if report["auc"] is None:
            axes.text(0.505, place, "one class only", color=_MUTED, va="center", fontsize=8)
    if overall is not None:
        axes.axvline(overall, color=_ORANGE, linewidth=1.2, linestyle="--")
        where = axes.get_xaxis_transform()
        axes.text(overall, 1.0, f"all rows: {overall:.4f}", color=_ORANGE, transform=where, ha="center", va="bottom")
    known = [v for v in values if not math.isnan(v)]
    spread = max([abs(v - 0.5) for v in known] or [0.5]) * 1.15
    axes.set_xlim(0.5 - (spread if any(v < 0.5 for v in known) else 0.0), min(1.01, 0.5 + spread))
    axes.set_yticks(range(len(shown)), [f"{n}  ({r['rows']:,} rows)" for n, r in zip(names, shown, strict=True)])
    more = f" (the {len(shown)} most frequent of {len(reports)})" if len(reports) > len(shown) else ""
    axes.set(xlabel="AUC (0.5 is chance)", ylim=(-0.7, len(shown) - 0.3), title=f"By {column}{more}\n")
    axes.grid(visible=False, axis="y")
    return _save(figure, path)


def _short(value: str | None) -> str:
    text = "(none)" if value is None else value
    return text if len(text) <= 24 else text[:23] + "…"


def _file_name(text: str) -> str:
    return "".join(c if c.isascii() and (c.isalnum() or c in "-_") else f"%{ord(c):x}" for c in text)


# --------------------------------------------------------------------------------------------------------------- words


def _training_words(result: Mapping[str, Any]) -> str:
    words = "The loss of the rows as they were trained, and what the evaluations said at that step."
    if result.get("stopped_early"):
        words += " Training stopped early: evaluations had ceased to improve."
    return words


def _reliability_words(report: Mapping[str, Any]) -> str:
    return (
        "Rows in bands of their prediction, half a unit of log-odds each: above the line the model promises too "
        f"little, below it too much. Bands with fewer than {_ROWS_OF_A_BAND} rows are left out. Over all rows the "
        f"model predicts {_figure(report, 'calibration')} times the positives that came."
    )


def _figure(report: Mapping[str, Any], name: str) -> str:
    value = report.get(name)
    return "undefined" if value is None else format(value, _METRICS[name][1])


def _page(run_dir: Path, result: Mapping[str, Any], figures: Sequence[tuple[str, str, Path]]) -> Iterator[str]:
    evaluation = result.get("eval") or {}
    title = html.escape(f"What {run_dir.name} learnt")
    yield f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
    yield f"<style>{_CSS}</style></head><body><main><h1>{title}</h1>"
    if "rows" in result:
        yield f"<p>{result['rows']:,} rows trained in {result['steps']:,} steps.</p>"
    if evaluation:
        labels = _by_label(evaluation)
        heads = "".join(f"<th>{html.escape(label or 'value')}</th>" for label in labels)
        yield f"<h2>Evaluation</h2><table><tr><th></th>{heads}</tr>"
        counts = [("rows", "rows"), ("positives", "rows with a positive label")]
        if any(report.get("rows_not_finite") for report in labels.values()):
            counts.append(("rows_not_finite", "more rows, left out: the score is not finite"))
        for name, words in counts:
            cells = "".join(f"<td>{_amount(report.get(name, 0))}</td>" for report in labels.values())
            yield f"<tr><th>{words}</th>{cells}</tr>"
        for name, (words, _) in _METRICS.items():
            if any(name in report for report in labels.values()):
                cells = "".join(f"<td>{_figure(report, name)}</td>" for report in labels.values())
                yield f"<tr><th>{words}</th>{cells}</tr>"
        yield "</table>"
    for heading, words, path in figures:
        data = base64.b64encode(path.read_bytes()).decode()
        yield f"<h2>{html.escape(heading)}</h2><p>{html.escape(words)}</p>"
        yield f'<img alt="{html.escape(heading)}" src="data:image/png;base64,{data}">'
    for column, reports in (evaluation.get("slices") or {}).items():
        yield f"<h2>Values of {html.escape(column)}</h2><table><tr><th>value</th><th>rows</th><th>positives</th>"
        yield "<th>AUC</th><th>logloss</th><th>calibration</th></tr>"
        for report in reports:
            name = html.escape("(none)" if report["value"] is None else report["value"])
            cells = "".join(f"<td>{_figure(report, key)}</td>" for key in ("auc", "logloss", "calibration"))
            yield f"<tr><th>{name}</th><td>{report['rows']:,}</td><td>{_amount(report['positives'])}</td>{cells}</tr>"
        yield "</table>"
    yield "</main></body></html>"


def _amount(value: float) -> str:
    """A number of rows; labels between 0 and 1 make parts of rows."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


_CSS = f"""
body {{ font: 15px/1.5 system-ui, sans-serif; color: {_INK}; margin: 0; background: #f9fafb; }}
main {{ max-width: 60rem; margin: 2rem auto; padding: 0 1.5rem 3rem; }}
h1 {{ font-size: 1.6rem; }} h2 {{ font-size: 1.15rem; margin-top: 2.2rem; }} p {{ color: {_MUTED}; max-width: 46rem; }}
img {{ max-width: 100%; border: 1px solid {_GRID}; border-radius: 6px; }}
table {{ border-collapse: collapse; background: white; border: 1px solid {_GRID}; }}
th, td {{ padding: .3rem .9rem; border-bottom: 1px solid {_GRID}; text-align: right; }}
td {{ font-variant-numeric: tabular-nums; }}
th {{ text-align: left; font-weight: 500; }}
"""
