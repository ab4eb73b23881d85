"""What a benchmark run found: cases with all their repetitions, written as JSON, as a Markdown table and as a plot."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

_FORMAT = 1


class ReportError(ValueError):
    """A file is not a report that this version reads."""


@dataclass(frozen=True)
class Case:
    """One thing measured, under one setting.

    Attributes:
        name: unique within the report.
        params: what distinguishes it from the others (system, batch_rows, ...).
        unit: of `values`; more is better.
        values: one a repetition.
        facts: other figures, one a repetition; their names end in their unit.
    """

    name: str
    params: dict[str, Any]
    unit: str
    values: list[float]
    facts: dict[str, list[float]] = field(default_factory=dict)

    @property
    def median(self) -> float:
        """The figure to quote."""
        return median(self.values)

    def fact(self, name: str) -> float | None:
        """Median of another figure; None when it was not measured."""
        return median(self.facts[name]) if self.facts.get(name) else None


@dataclass(frozen=True)
class Ratio:
    """How many times faster one case is than another. `values` pairs repetitions, which ran next to each other."""

    name: str
    values: list[float]
    of_medians: float


@dataclass
class Report:
    """A whole run.

    Attributes:
        benchmark: train, ps, dense, scaling, ...
        date: when it began, UTC, ISO 8601.
        environment: see `machine.describe`.
        config: every setting.
        cases: in the order of the table.
        ratios: comparisons within this run.
        notes: sentences that belong to the figures.
    """

    benchmark: str
    date: str
    environment: dict[str, Any]
    config: dict[str, Any]
    cases: list[Case]
    ratios: list[Ratio] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain data; medians are there for readers, `values` are what counts."""
        plain = {"format": _FORMAT, **asdict(self)}
        for case, data in zip(self.cases, plain["cases"], strict=True):
            data |= {"median": case.median, "low": min(case.values), "high": max(case.values)}
        return plain

    @classmethod
    def read(cls, path: Path) -> Report:
        """The report in a file, or in `results.json` of a folder.

        Raises:
            ReportError: there is none, or it is of another version.
        """
        file = path / "results.json" if path.is_dir() else path
        try:
            plain = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ReportError(f"{file} is no benchmark report: {error}") from None
        if not isinstance(plain, dict) or plain.get("format") != _FORMAT:
            raise ReportError(f"{file} is no benchmark report of format {_FORMAT}")
        cases = [Case(c["name"], c["params"], c["unit"], c["values"], c["facts"]) for c in plain["cases"]]
        ratios = [Ratio(**ratio) for ratio in plain["ratios"]]
        return cls(
            plain["benchmark"], plain["date"], plain["environment"], plain["config"], cases, ratios, plain["notes"]
        )

    def write(self, directory: Path) -> list[Path]:
        """Writes `results.json`, `results.md` and, with matplotlib, `results.png`; returns what was written."""
        directory.mkdir(parents=True, exist_ok=True)
        written = [directory / "results.json", directory / "results.md"]
        written[0].write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        written[1].write_text(self.markdown(), encoding="utf-8")
        try:
            import matplotlib  # noqa: F401, ICN001
        except ImportError:
            return written
        written.append(directory / "results.png")
        self.plot(written[2])
        return written

    def markdown(self) -> str:
        """Table, comparisons, notes, and what it was measured on."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        environment = self.environment
        versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
        yield f"# bench {self.benchmark}"
        yield ""
        yield from _table(self.cases)
        if self.ratios:
            yield ""
            yield "| ratio | of medians | range over repetitions |"
            yield "|---|---:|---:|"
            for ratio in self.ratios:
                yield f"| {ratio.name} | {ratio.of_medians:.2f} | {min(ratio.values):.2f} to {max(ratio.values):.2f} |"
        yield ""
        for note in self.notes:
            yield f"- {note}"
        repetitions = max(len(case.values) for case in self.cases)
        yield f"- Medians of {repetitions} repetitions, run in turns; the range is the lowest and the highest."
        yield (
            f"- Measured {self.date} on {environment['cpu']}, {environment['cores']} cores, "
            f"{environment['memory_gib']} GiB, {environment['system']}; load average before: "
            f"{environment['load_average_before']}."
        )
        yield f"- Python {environment['python']}, {versions}; commit {environment['commit'] or 'unknown'}."
        yield f"- Settings: `{json.dumps(self.config)}`"

    def plot(self, path: Path) -> None:
        """Medians as bars, with every repetition as a dot; one panel for each unit."""
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot as plt

        units = list(dict.fromkeys(case.unit for case in self.cases))
        panels = [[case for case in self.cases if case.unit == unit] for unit in units]
        height = sum(0.6 + 0.32 * len(panel) for panel in panels)
        figure, axes = plt.subplots(
            len(panels), 1, figsize=(9, height + 0.8), squeeze=False, height_ratios=[2 + len(panel) for panel in panels]
        )
        for unit, panel, axis in zip(units, panels, axes[:, 0], strict=True):
            systems = list(dict.fromkeys(str(case.params.get("system", "")) for case in panel))
            colours = [f"C{systems.index(str(case.params.get('system', ''))) % 10}" for case in panel]
            rows = range(len(panel))
            axis.barh(rows, [case.median for case in panel], color=colours, alpha=0.6)
            for row, case in zip(rows, panel, strict=True):
                axis.plot(case.values, [row] * len(case.values), "o", color="black", markersize=3)
            axis.set_yticks(list(rows), [case.name for case in panel])
            axis.invert_yaxis()
            axis.set_xlabel(unit)
            axis.set_xlim(left=0)
            axis.grid(axis="x", alpha=0.3)
            axis.xaxis.set_major_formatter(mpl.ticker.FuncFormatter(lambda value, _: f"{value:,.0f}"))
        environment = self.environment
        where = f"{environment['cpu']}, {environment['cores']} cores, {self.date[:10]}"
        figure.suptitle(f"bench {self.benchmark}: medians, dots are repetitions\n{where}", fontsize=10)
        figure.tight_layout()
        figure.savefig(path, dpi=120)
        plt.close(figure)


def ratios(cases: Sequence[Case], *, of: str, same: str) -> list[Ratio]:
    """The system `of` against every other system, among cases with the same value of the parameter `same`."""
    found = []
    for case in cases:
        if case.params.get("system") != of:
            continue
        for other in cases:
            if other.params.get("system") != of and other.unit == case.unit and other.params[same] == case.params[same]:
                pairs = [a / b for a, b in zip(case.values, other.values, strict=False)]
                found.append(Ratio(f"{case.name} / {other.name}", pairs, case.median / other.median))
    return found


def compare(before: Report, after: Report) -> str:
    """A Markdown table of two reports, case by case; says which changes are beyond the spread of the repetitions."""
    lines = [f"# bench {before.benchmark}: {before.date} to {after.date}", ""]
    lines += ["| case | unit | before | after | ratio | beyond spread |", "|---|---|---:|---:|---:|---|"]
    older = {case.name: case for case in before.cases}
    for case in after.cases:
        old = older.pop(case.name, None)
        if old is None:
            lines.append(f"| {case.name} | {case.unit} | | {_number(case.median)} | | new |")
            continue
        apart = min(case.values) > max(old.values) or max(case.values) < min(old.values)
        enough = min(len(case.values), len(old.values)) >= 3
        verdict = "no" if not apart else "yes" if enough else "too few repetitions"
        figures = f"{_number(old.median)} | {_number(case.median)} | {case.median / old.median:.2f}"
        lines.append(f"| {case.name} | {case.unit} | {figures} | {verdict} |")
    lines += [f"| {case.name} | {case.unit} | {_number(case.median)} | | | gone |" for case in older.values()]
    lines.append("")
    for what in ("cpu", "cores", "system", "python", "versions", "commit"):
        a, b = before.environment.get(what), after.environment.get(what)
        if a != b:
            lines.append(f"- differs: {what}: {a} / {b}")
    for key in sorted({*before.config, *after.config}):
        if before.config.get(key) != after.config.get(key):
            lines.append(f"- differs: setting {key}: {before.config.get(key)} / {after.config.get(key)}")
    return "\n".join(lines) + "\n"


def _table(cases: Sequence[Case]) -> Iterator[str]:
    facts = list(dict.fromkeys(name for case in cases for name in case.facts))
    yield "| " + " | ".join(["case", "median", "range", "unit", *(name.replace("_", " ") for name in facts)]) + " |"
    yield "|---|---:|---:|---|" + "---:|" * len(facts)
    for case in cases:
        cells = [
            case.name,
            _number(case.median),
            f"{_number(min(case.values))} to {_number(max(case.values))}",
            case.unit,
        ]
        cells += ["" if (value := case.fact(name)) is None else _number(value) for name in facts]
        yield "| " + " | ".join(cells) + " |"


def _number(value: float) -> str:
    """Three significant digits or more: 12,345; 12.3; 0.123."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
