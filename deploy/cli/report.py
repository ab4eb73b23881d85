"""``paddlewheel report``: the proof that every row was trained once, and what losses have cost."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from paddlewheel.deploy.cli.arguments import Json, answer
from paddlewheel.trainer.job.exit_codes import EX_USAGE

if TYPE_CHECKING:
    from paddlewheel.trainer.coordinator.run_report import AttemptRecord, DayRecord, Report


def report(
    run_dir: Annotated[
        str, Parameter(help="The run folder of a job (`run_dir`), or where its checkpoints are: s3://....")
    ],
    *,
    json: Json = False,
) -> int:
    """Prove from a run's journal how often each row was trained in the final model, and tell what losses have cost.

    Exit code 0 when no row was trained twice or left out; 64 when some were, or when the journal cannot prove it
    (`verdict` in the JSON tells which).
    """
    from paddlewheel.trainer.coordinator import run_report

    found = run_report.report(run_dir)
    answer(found.to_json(), json=json, text=lambda: "\n".join(_lines(found)))
    return 0 if found.exact else EX_USAGE


def _lines(found: "Report") -> Iterator[str]:
    from paddlewheel.deploy.launch.display import duration

    if found.warm_start is not None:
        taken = [f"table {mine} ({table['keys']:,} keys)" for mine, table in found.warm_start["tables"].items()]
        parts = ", ".join([*taken, *(["the dense part"] if found.warm_start["dense"] else [])])
        yield f"began with {parts} of {found.warm_start['source']}"
    for proof in found.epochs:
        skipped = f", {proof.num_skipped:,} of them in steps that were skipped" if proof.num_skipped else ""
        if proof.is_exact:
            said = f"each of {proof.num_rows:,} rows once{skipped}"
        elif found.verdict == "not proven" and not proof.num_repeated:
            said = f"{proof.num_trained:,} of {proof.num_rows:,} rows in the records that are there"
        elif proof.epoch >= found.current_epoch and not proof.num_repeated:
            said = f"{proof.num_trained:,} of {proof.num_rows:,} rows so far, each once{skipped}"
        else:
            said = f"NOT EXACT: {proof.num_repeated:,} rows again, {proof.num_missing:,} of {proof.num_rows:,} left out"
        day = found.day_names.get(proof.epoch)
        yield f"{f'day {day}' if day else f'epoch {proof.epoch + 1}'}: {said}"
    if not found.steps:
        yield "no checkpoint was committed, so nothing is proven"
    else:
        newest = f"{len(found.steps)} checkpoints lead to step {found.steps[-1]}"
        failed = f", {found.num_failed_checkpoints} failed" if found.num_failed_checkpoints else ""
        yield f"{newest}; saving took {duration(found.checkpoint_seconds)} in all{failed}"
    for trained in found.days:
        yield from _day(trained)
    for story in found.attempts:
        yield from _attempt(story)
    lost = [story for story in found.attempts if story.rows_replayed or story.down_seconds or story.repeated_seconds]
    if lost:
        rows = sum(story.rows_replayed or 0 for story in lost)
        unknown = " (and those of a lost coordinator)" if any(story.rows_replayed is None for story in lost) else ""
        seconds = sum(story.down_seconds + story.repeated_seconds for story in lost)
        yield f"losses cost {duration(seconds)}: {rows:,} rows{unknown} were trained again"
    if found.outcome is not None:
        cause = f": {found.outcome['cause']}" if found.outcome["cause"] else ""
        yield f"the last run ended with exit code {found.outcome['exit_code']}{cause}"
    if found.lost_records:
        yield f"{found.lost_records} records of the journal are missing or damaged"
    if found.verdict == "exact":
        yield "proven: the model has seen each of these rows once"
    elif found.verdict == "not exact":
        yield "THE MODEL HAS NOT SEEN EACH ROW ONCE"
    else:
        yield "NOT PROVEN, which is not to say that rows were lost or repeated:"
        yield from (f"    {reason}" for reason in found.reasons)


def _day(story: "DayRecord") -> Iterator[str]:
    from paddlewheel.deploy.launch.display import duration

    if story.day:
        scores = story.validation or {}
        named = {"AUC": scores.get("auc"), "logloss": scores.get("logloss")}
        before = "".join(f", {name} {value:.4f}" for name, value in named.items() if value is not None)
        note = f"{before} before training" if before else ""
        yield f"day {story.day}: {story.rows:,} rows in {duration(story.seconds)}{note}"
    else:
        yield f"day boundary after {story.rows:,} rows"
    for name, sizes in story.tables.items():
        told = [f"{sizes[what]:,} {what}" for what in ("new", "admitted", "evicted") if sizes[what] is not None]
        yield f"    {name}: {sizes['keys']:,} keys, {', '.join(told)}"


def _attempt(story: "AttemptRecord") -> Iterator[str]:
    from paddlewheel.deploy.launch.display import duration

    begin = f"from step {story.restored}" if story.restored is not None else "from nothing"
    roles = f"{story.num_servers} servers, {story.num_trainers} trainers"
    lived = duration(story.ended - story.began) if story.ended is not None else "so far"
    yield f"attempt {story.number}: {begin}, {roles}, {story.num_checkpoints} checkpoints, {lived}"
    if story.cause:
        again = "an unknown number of" if story.rows_replayed is None else f"{story.rows_replayed:,}"
        cost = f"{again} rows again, {duration(story.down_seconds)} until training went on"
        yield f"    ended because {story.cause}" + (f"; {cost}" if story.down_seconds else "")
