"""Job files that no person writes are refused in a sentence, and soon: depth, aliases, devices, numbers, odd text."""

from __future__ import annotations

from pathlib import Path

import pytest

from paddlewheel.trainer.job.config import JobConfig
from paddlewheel.trainer.job.control import ControlConfig
from paddlewheel.trainer.job.errors import ConfigError

JOB = "name: x\ndata: {train: t, labels: [y], sparse: [{name: a}]}\n"


def laughs(merge: bool) -> str:
    lines = ["a0: &a0 {x: 1}" if merge else "a0: &a0 [x]"]
    for level in range(1, 30):
        aliases = "[" + ",".join([f"*a{level - 1}"] * 10) + "]"
        lines.append(f"a{level}: &a{level} {'{<<: ' + aliases + '}' if merge else aliases}")
    return "\n".join(lines)


def refusal(tmp_path: Path, text: str | bytes, *overrides: str) -> str:
    path = tmp_path / "job.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        JobConfig.load(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data: " + "[" * 20_000, "nested more than 100 deep"),
        ("data: " + "{a: " * 20_000, "nested more than 100 deep"),
        ("- " * 20_000, "nested more than 100 deep"),
        ("a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 5000)), "more than 100 levels"),
        (laughs(merge=False), "more than 1,000,000 values"),
        (laughs(merge=True), "more than 1,000,000 values"),
        ("a: &a [*a]", "inside its own anchor"),
        ("a: &a {b: *a}", "inside its own anchor"),
        ("seed: " + "9" * 5000, "4300 digits"),
        ("? [a, b]\n: 1", "cannot be a key"),
        ("? {a: b}\n: 1", "cannot be a key"),
        ("data: !!set {a, b}", "data: is a set"),
        ("data: !!binary aGk=", "data: is a bytes"),
        ("data: !!timestamp 2001-01-01", "data: is a date"),
        ("data: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
        ("data: !!int x", "not readable as YAML"),
        ("data: !!float [1]", "not readable as YAML"),
        (b"name: \xff\xfe", "cannot be read"),
        ("name: a\x00b", "not readable as YAML"),
        (" " * (17 << 20), "no job file"),
    ],
    ids=range(20),
)
def test_files_that_are_no_job(tmp_path: Path, text: str | bytes, words: str) -> None:
    assert words in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "train.dense_optimizer.learning_rate=.inf",
            "train.dense_optimizer.learning_rate: is inf; a number in a job must be finite",
        ),
        ("train.dense_optimizer.learning_rate=.nan", "train.dense_optimizer.learning_rate: is nan; a number"),
        (
            "train.dense_optimizer.learning_rate=1e300",
            "train.dense_optimizer.learning_rate: 1e+300 is outside of what a float32 holds",
        ),
        ("tables={default: {optimizer: {rule: adam, learning_rate: .inf}}}", "tables.default.optimizer.learning_rate"),
        ("control.heartbeat_seconds=1e-300", "control.heartbeat_seconds"),
        ("control.heartbeat_seconds=1e-6", "control.heartbeat_seconds: input should be greater than or equal to 0.01"),
        ("control.step_timeout_seconds=1e30", "control.step_timeout_seconds"),
        ("checkpoint.every_minutes=1e-20", "checkpoint.every_minutes"),
        ("cluster.servers=1000000000", "cluster.servers: input should be less than or equal to 10000"),
        ("cluster.trainers=1000000000", "cluster.trainers: input should be less than or equal to 10000"),
        ("seed=99999999999999999999999999", "seed: 99999999999999999999999999 does not fit in 64 bits"),
        ("data.sparse.0.offset=-99999999999999999999999", "data.sparse.0.offset"),
        ('data.train="a\\0b"', "data.train: "),
        ('name="\\ud800"', "lone surrogate"),
        ("data={1: 2}", "data: the key 1 is no text: write it in quotes"),
        ("data={null: 2}", "the key null is no text"),
        ("data.sparse.²=1", "'²' is not one of 0 to 0"),
        ("data.sparse." + "9" * 5000 + "=1", "is a list of 1 entries"),
        ("x=[*a]", "undefined alias"),
    ],
)
def test_values_that_no_job_can_have(tmp_path: Path, override: str, words: str) -> None:
    assert words in refusal(tmp_path, JOB, override)


def test_a_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + JOB.encode())
    assert JobConfig.load(path).name == "x"


def test_devices_are_not_read_through() -> None:
    with pytest.raises(ConfigError, match="no job file"):
        JobConfig.load("/dev/zero")
    with pytest.raises(ConfigError, match="cannot be read"):
        JobConfig.load("a\0b")


def test_every_default_lies_within_the_limits() -> None:
    ControlConfig.model_validate(ControlConfig().model_dump())
