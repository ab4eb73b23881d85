"""Values of catalogued metrics, written by one thread and collected by another."""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, product
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from paddlewheel.trainer.protocol.messages import Durations
from paddlewheel.trainer.telemetry.catalogue import COMMON_LABELS, MAX_OPEN_VALUES, SECONDS_BOUNDS, Kind, Metric

_OTHER = "other"


class DurationHistogram:
    """Durations counted in the catalogue's buckets, where they are measured. For one writing thread."""

    __slots__ = ("counts", "sum_seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS_BOUNDS) + 1)
        self.sum_seconds = 0.0

    def observe(self, seconds: float) -> None:
        """Adds one duration."""
        self.counts[bisect_left(SECONDS_BOUNDS, seconds)] += 1
        self.sum_seconds += seconds

    def message(self) -> Durations:
        """For a progress event."""
        return Durations(counts=tuple(self.counts), sum_seconds=self.sum_seconds)


class Series(Collector):
    """The current values of some metrics, as a Prometheus collector.

    Args:
        metrics: what may be set. Counters with closed labels begin at 0, so that their first increase is seen.
        common: values of COMMON_LABELS; may change until the first collection, `rank` is learned on joining.
    """

    def __init__(self, metrics: Iterable[Metric], common: Mapping[str, str]) -> None:
        self.common = dict(common)
        assert tuple(self.common) == COMMON_LABELS
        self._metrics = {metric.name: metric for metric in metrics}
        self._lock = threading.RLock()
        self._values: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in self._metrics}
        self._buckets: dict[str, dict[tuple[str, ...], list[float]]] = {name: {} for name in self._metrics}
        self._followed: dict[tuple[str, tuple[str, ...], int], float] = {}
        for metric in self._metrics.values():
            if metric.kind is not Kind.GAUGE:
                for values in product(*(label.values or () for label in metric.labels)):
                    self._begin(metric, values)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Sets a gauge."""
        metric, key = self._find(name, labels, Kind.GAUGE)
        with self._lock:
            if (bounded := self._bounded(metric, key)) is not None:
                self._values[name][bounded] = float(value)

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Raises a counter; what is not a number >= 0 is ignored, so that it can never go back."""
        metric, key = self._find(name, labels, Kind.COUNTER)
        with self._lock:
            if (bounded := self._bounded(metric, key)) is not None:
                values = self._values[name]
                values[bounded] = values.get(bounded, 0.0) + (amount if math.isfinite(amount) and amount > 0 else 0.0)

    def follow(self, name: str, reading: float, **labels: str) -> None:
        """Raises a counter by the growth of another process's own; a smaller reading means that it began anew."""
        self.add(name, self._growth(name, tuple(labels.values()), 0, float(reading)), **labels)

    def follow_histogram(self, name: str, counts: Sequence[float], sum_seconds: float, **labels: str) -> None:
        """The same for a DurationHistogram."""
        metric, key = self._find(name, labels, Kind.HISTOGRAM)
        if len(counts) != len(SECONDS_BOUNDS) + 1:
            raise ValueError(f"{name} has {len(SECONDS_BOUNDS) + 1} buckets, got {len(counts)}")
        with self._lock:
            if (bounded := self._bounded(metric, key)) is None:
                return
            total = self._buckets[name].setdefault(bounded, [0.0] * (len(counts) + 1))
            for i, reading in enumerate((*counts, sum_seconds)):
                total[i] += self._growth(name, key, i, float(reading))

    def value(self, name: str) -> float:
        """What a metric without labels stands at; 0 before it is set."""
        with self._lock:
            return self._values[name].get((), 0.0)

    def begin_anew(self) -> None:
        """The process whose counters are followed was replaced: its counters begin at 0."""
        with self._lock:
            self._followed.clear()

    def rebase(self, name: str, reading: float) -> None:
        """A followed counter without labels stands at `reading` already; only what it grows from there counts."""
        with self._lock:
            self._followed[name, (), 0] = reading

    def collect(self) -> Iterator[Family]:
        """All families, also those without a value yet."""
        names = list(COMMON_LABELS)
        with self._lock:
            common = list(self.common.values())
            for metric in self._metrics.values():
                labels = names + [label.name for label in metric.labels]
                if metric.kind is Kind.HISTOGRAM:
                    family: Any = HistogramMetricFamily(metric.name, metric.help, labels=labels)
                    for key, counts in self._buckets[metric.name].items():
                        bounds = [*map(floatToGoString, SECONDS_BOUNDS), "+Inf"]
                        buckets = list(zip(bounds, accumulate(counts[:-1]), strict=True))
                        family.add_metric([*common, *key], buckets, counts[-1])
                else:
                    kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
                    family = kind(metric.name, metric.help, labels=labels)
                    for key, value in self._values[metric.name].items():
                        family.add_metric([*common, *key], value)
                yield family

    def _begin(self, metric: Metric, values: tuple[str, ...]) -> None:
        if metric.kind is Kind.HISTOGRAM:
            self._buckets[metric.name][values] = [0.0] * (len(SECONDS_BOUNDS) + 2)
        else:
            self._values[metric.name][values] = 0.0

    def _find(self, name: str, labels: Mapping[str, str], kind: Kind) -> tuple[Metric, tuple[str, ...]]:
        metric = self._metrics[name]
        assert metric.kind is kind, f"{name} is a {metric.kind.value}"
        assert set(labels) == {label.name for label in metric.labels}, f"{name} has labels {metric.labels}"
        return metric, tuple(labels[label.name] for label in metric.labels)

    def _bounded(self, metric: Metric, key: tuple[str, ...]) -> tuple[str, ...] | None:
        """The key as it is kept: None if a closed set lacks the value, `other` for one too many of an open set."""
        known = self._buckets[metric.name] if metric.kind is Kind.HISTOGRAM else self._values[metric.name]
        if key in known:
            return key
        bounded = list(key)
        for i, label in enumerate(metric.labels):
            if label.values is None:
                seen = {values[i] for values in known} - {_OTHER}
                if key[i] not in seen and len(seen) >= MAX_OPEN_VALUES:
                    bounded[i] = _OTHER
            elif key[i] not in label.values:
                return None
        return tuple(bounded)

    def _growth(self, name: str, key: tuple[str, ...], part: int, reading: float) -> float:
        if not math.isfinite(reading):
            return 0.0
        with self._lock:
            before = self._followed.get((name, key, part), 0.0)
            self._followed[name, key, part] = reading
        return reading - before if reading >= before else reading


def with_labels(families: Iterable[Family], labels: Mapping[str, str]) -> Iterator[Family]:
    """Another collector's families, with these labels added to every sample."""
    for family in families:
        for i, sample in enumerate(family.samples):
            family.samples[i] = sample._replace(labels={**labels, **sample.labels})
        yield family
