from __future__ import annotations

import json
from pathlib import Path

import pytest

from paddlewheel.deploy.bench.speed.report import Case, Report, ReportError, compare, ratios

ENVIRONMENT = {
    "cpu": "a processor",
    "cores": 2,
    "memory_gib": 8.0,
    "system": "Linux",
    "python": "3.11",
    "versions": {"numpy": "2"},
    "commit": None,
    "load_average_before": 0.1,
}


def case(system: str, *values: float, batch_rows: int = 512) -> Case:
    params = {"system": system, "batch_rows": batch_rows}
    return Case(
        f"{system}, batch {batch_rows}", params, "samples/s", list(values), {"peak_MiB": [v / 10 for v in values]}
    )


def report(*cases: Case, **config: object) -> Report:
    return Report("train", "2030-01-02T03:04:05+00:00", ENVIRONMENT, dict(config), list(cases))


def test_written_and_read_again_is_the_same(tmp_path: Path) -> None:
    before = report(case("ours", 1000.0, 3000.0, 2000.0), rows=7)
    before.ratios = ratios([*before.cases, case("peer", 500.0)], of="ours", same="batch_rows")
    before.notes = ["a note"]
    before.write(tmp_path)
    assert Report.read(tmp_path) == before
    assert Report.read(tmp_path / "results.json") == before


def test_table_quotes_the_medians_of_the_json(tmp_path: Path) -> None:
    report(case("ours", 1000.0, 3000.0, 2000.0), case("peer", 70.25, 70.5)).write(tmp_path)
    ours, peer = json.loads((tmp_path / "results.json").read_text())["cases"]
    assert (ours["median"], ours["low"], ours["high"]) == (2000.0, 1000.0, 3000.0)
    assert peer["median"] == pytest.approx(70.375)
    rows = [line for line in (tmp_path / "results.md").read_text().splitlines() if line.startswith("| ")]
    assert rows[1] == "| ours, batch 512 | 2,000 | 1,000 to 3,000 | samples/s | 200 |"
    assert rows[2] == "| peer, batch 512 | 70.4 | 70.2 to 70.5 | samples/s | 7.04 |"


def test_plot_is_drawn(tmp_path: Path) -> None:
    written = report(case("ours", 1000.0, 3000.0), Case("keys", {}, "keys/s", [5.0])).write(tmp_path)
    assert [path.name for path in written] == ["results.json", "results.md", "results.png"]
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")


def test_ratios_pair_repetitions_and_only_like_with_like() -> None:
    cases = [
        case("ours", 10.0, 30.0),
        case("peer", 5.0, 10.0),
        case("ours", 1.0, batch_rows=8),
        case("peer", 4.0, batch_rows=8),
    ]
    first, second = ratios(cases, of="ours", same="batch_rows")
    assert (first.values, first.of_medians) == ([2.0, 3.0], pytest.approx(20 / 7.5))
    assert (second.name, second.values) == ("ours, batch 8 / peer, batch 8", [0.25])


def test_compare_tells_change_from_noise_and_what_else_differs() -> None:
    before = report(case("a", 10.0, 11.0, 12.0), case("b", 10.0, 11.0, 12.0), case("c", 10.0), case("d", 1.0), rows=1)
    after = report(case("a", 20.0, 21.0, 22.0), case("b", 12.0, 13.0, 14.0), case("c", 20.0), case("e", 1.0), rows=2)
    text = compare(before, after)
    assert "| a, batch 512 | samples/s | 11.0 | 21.0 | 1.91 | yes |" in text
    assert "| b, batch 512 | samples/s | 11.0 | 13.0 | 1.18 | no |" in text
    assert "| c, batch 512 | samples/s | 10.0 | 20.0 | 2.00 | too few repetitions |" in text
    assert "| d, batch 512 | samples/s | 1.00 | | | gone |" in text
    assert "| e, batch 512 | samples/s | | 1.00 | | new |" in text
    assert "- differs: setting rows: 1 / 2" in text
    assert "differs: cpu" not in text


@pytest.mark.parametrize("content", [None, "not json", "[]", '{"format": 99}'])
def test_what_is_no_report_is_refused(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "results.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ReportError, match=r"results\.json is no benchmark report"):
        Report.read(tmp_path)
