"""``paddlewheel job``: what a job file may say, and what it says."""

import json as json_module

from cyclopts import App

from paddlewheel.deploy.cli.arguments import JobFile, Json, Overrides, answer

app = App(name="job", help="Look at a job file: its keys, its values, whether it can run.")


@app.command
def schema() -> None:
    """Print the JSON schema of a job file, with the meaning and unit of every key, for editors and people."""
    from paddlewheel.trainer.job.schema import job_schema

    print(json_module.dumps(job_schema(), indent=2, ensure_ascii=False))


@app.command
def show(job: JobFile, *, overrides: Overrides = (), json: Json = False) -> None:
    """Print a job with every key spelled out: what is in the file, `--set`, and the defaults."""
    from paddlewheel.trainer.job.config import JobConfig

    config = JobConfig.load(job, overrides)
    answer(config.model_dump(mode="json"), json=json, text=lambda: config.to_yaml().rstrip())


@app.command
def check(job: JobFile, *, overrides: Overrides = (), json: Json = False) -> None:
    """Say whether a job can run here: the file, the environment, the data and its first rows, the ports it names."""
    from paddlewheel.deploy.checks import preflight
    from paddlewheel.trainer.job.config import JobConfig

    config = JobConfig.load(job, overrides)
    found = preflight.check(config)
    rows = f"{found.train_rows:,} training rows" + (f", {found.eval_rows:,} evaluation rows" if found.eval_rows else "")
    left_out = "".join(f"\nleft out: {reason}" for reason in found.skipped_files)
    left_out += "".join(f"\nwarning: {warning}" for warning in found.warnings)
    answer(vars(found), json=json, text=lambda: f"{config.name} can run: {rows}, {found.paddle}{left_out}")
