"""python -m paddlewheel.deploy.monitoring writes grafana/*.json; with --check it only says whether they are current."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from paddlewheel.deploy.monitoring.dashboards import DASHBOARDS, to_grafana

FOLDER = Path(__file__).parent


def generated() -> dict[Path, str]:
    """Every generated file and what belongs into it."""
    files = {}
    for dashboard in DASHBOARDS:
        text = json.dumps(to_grafana(dashboard), indent=1, ensure_ascii=False) + "\n"
        files[FOLDER / "grafana" / f"{dashboard.name}.json"] = text
    return files


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m paddlewheel.deploy.monitoring", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is not current")
    check = parser.parse_args().check
    stale = [path for path, text in generated().items() if not path.is_file() or path.read_text("utf-8") != text]
    for path in stale:
        if check:
            sys.stderr.write(f"{path} is not current: run python -m paddlewheel.deploy.monitoring\n")
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(generated()[path], encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
