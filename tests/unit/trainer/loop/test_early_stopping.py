"""Which evaluation is the best, when to stop, and when to evaluate."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from paddlewheel.trainer.job.train import EvaluationConfig
from paddlewheel.trainer.loop.early_stopping import EarlyStopping, due, due_after_epoch


def verdicts(values: list, **config) -> list[tuple[bool, bool]]:
    best = EarlyStopping(EvaluationConfig(every_steps=1, **config))
    return [
        (verdict.best, verdict.stop)
        for step, value in enumerate(values)
        for verdict in [best.observe(step, {config.get("metric", "auc"): value})]
    ]


def test_higher_auc_is_better_and_patience_counts_in_a_row() -> None:
    assert verdicts([0.6, 0.7, 0.7, 0.69, 0.71, 0.7, 0.7, 0.7], patience=3) == [
        (True, False),
        (True, False),
        (False, False),
        (False, False),
        (True, False),
        (False, False),
        (False, False),
        (False, True),
    ]


def test_lower_logloss_is_better() -> None:
    assert [b for b, _ in verdicts([0.5, 0.4, 0.45, 0.39], metric="logloss")] == [True, True, False, True]


def test_an_improvement_has_a_least_size() -> None:
    assert [b for b, _ in verdicts([0.5, 0.505, 0.511], min_delta=0.01)] == [True, False, True]


def test_an_undefined_value_is_never_an_improvement() -> None:
    assert verdicts([None, float("nan"), 0.1, None], patience=2) == [
        (False, False),
        (False, True),
        (True, False),
        (False, False),
    ]


def test_nothing_stops_without_being_asked() -> None:
    assert not any(stop for _, stop in verdicts([0.9, *[0.5] * 50]))


def test_a_metric_that_is_not_there_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"metric is gauc.*give data.group"):
        EarlyStopping(EvaluationConfig(every_steps=1, metric="gauc")).observe(1, {"auc": 0.5})
    with pytest.raises(ValueError, match=r"metric is weighted_logloss.*give data.sample_weight"):
        EarlyStopping(EvaluationConfig(every_steps=1, metric="weighted_logloss")).observe(1, {"logloss": 0.5})


def test_state_continues_where_it_was() -> None:
    config = EvaluationConfig(every_steps=1, patience=2)
    one, two = EarlyStopping(config), EarlyStopping(config)
    one.observe(10, {"auc": 0.7})
    one.observe(20, {"auc": 0.6})
    two.load_state(one.state())
    assert (two.value, two.step) == (0.7, 10)
    assert two.observe(30, {"auc": 0.65}).stop


@pytest.mark.parametrize("config", [{"save_best": True}, {"patience": 2}])
def test_what_needs_evaluations_says_so(config: dict) -> None:
    with pytest.raises(ValidationError, match="need every_steps or every_epochs"):
        EvaluationConfig(**config)


def test_when() -> None:
    by_steps, by_epochs = EvaluationConfig(every_steps=5), EvaluationConfig(every_epochs=2)
    assert [s for s in range(1, 16) if due(by_steps, s)] == [5, 10, 15]
    assert not any(due(by_epochs, s) for s in range(1, 16))
    assert [e for e in range(6) if due_after_epoch(by_epochs, e, 6)] == [1, 3]  # the end has its own evaluation
    assert not any(due_after_epoch(by_steps, e, 6) for e in range(6))
