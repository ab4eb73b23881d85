"""``paddlewheel doctor`` and ``paddlewheel version``."""

import sys

from paddlewheel.deploy.cli.arguments import Json, answer

_MARKS = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "fail": "[red]FAIL[/]"}


def doctor(*, json: Json = False) -> int:
    """Say what this environment has and lacks, with a remedy for each. Exit code 64 when a job could not run here."""
    from paddlewheel.deploy.checks import doctor

    findings = doctor.examine()
    failed = any(finding.level == "fail" for finding in findings)
    if json:
        answer([vars(finding) for finding in findings], json=True, text=str)
    else:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for finding in findings:
            remedy = f"\n-> {escape(finding.remedy)}" if finding.remedy else ""
            table.add_row(_MARKS[finding.level], finding.what, escape(finding.found) + remedy)
        console = Console()
        console.print(table)
        console.print("A job cannot run here yet." if failed else "Ready to run a job.")
    return 64 if failed else 0


def version(*, json: Json = False) -> None:
    """Print the versions that matter in a bug report."""
    from paddlewheel.deploy.checks import doctor

    versions = {"python": sys.version.split()[0], **doctor.versions()}
    answer(versions, json=json, text=lambda: "\n".join(f"{name} {found}" for name, found in versions.items()))
