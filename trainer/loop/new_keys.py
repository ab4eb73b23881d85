"""How tables grow while a trainer trains: keys that it was the first to bring, by table and by feature.

Counted from what pulls return: a key that the servers have never been shown is new. A key that several batches bring
before its first push is applied is counted by each, so these counts lie a little above what the servers hold; the
servers' own key counts are exact, these say where growth comes from.

Legend: U unique keys of a table in a batch, P positions (U + 1, position 0 is no key).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from paddlewheel.data_pipeline.batch import Batch, TableKeys


class NewKeyCounter:
    """Counts since the start of this trainer. For one writing thread; others read copies (`counts`)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # names come up while others read
        self.new_keys: Counter[str] = Counter()
        """By table."""
        self.new_keys_of_features: Counter[str] = Counter()
        """By feature; a key that several features bring counts for each."""

    def counts(self) -> tuple[Counter[str], Counter[str]]:
        """Copies of both, as of one batch. From any thread."""
        with self._lock:
            return Counter(self.new_keys), Counter(self.new_keys_of_features)

    def observe(self, batch: Batch, shows: Mapping[str, NDArray[np.float32]]) -> None:
        """Take a batch and how often the servers had been shown its keys: [U] by table."""
        with self._lock:
            for name, keys in batch.tables.items():
                is_new_U = shows[name] == 0
                count = int(np.count_nonzero(is_new_U))
                if count:
                    self.new_keys[name] += count
                    self._observe_features(keys, is_new_U)

    def _observe_features(self, keys: TableKeys, is_new_U: NDArray[np.bool_]) -> None:
        is_new_P = np.concatenate([[False], is_new_U])
        if keys.single_BF.size:
            counts_F = _distinct_by_column(keys.single_BF, is_new_P)
            self.new_keys_of_features.update(dict(zip(keys.single_names, counts_F.tolist(), strict=True)))
        for name, at_BL in keys.index.items():
            if name not in keys.single_names:
                self.new_keys_of_features[name] += int(_distinct_by_column(at_BL.reshape(-1, 1), is_new_P)[0])


def _distinct_by_column(at_BF: NDArray[np.int32], wanted_P: NDArray[np.bool_]) -> NDArray[np.int64]:
    """How many of the wanted positions each column holds, [F]; one that stands in several rows counts once."""
    num_columns, size = at_BF.shape[1], len(wanted_P)
    found_N = np.flatnonzero(wanted_P[at_BF])
    if len(found_N) < size // 4:
        place_N = found_N % num_columns * size + at_BF.ravel()[found_N]
        return np.bincount(np.unique(place_N) // size, minlength=num_columns).astype(np.int64)
    counts_F = np.zeros(num_columns, np.int64)
    for column in range(num_columns):
        seen_P = np.zeros(size, np.bool_)
        seen_P[at_BF[:, column]] = True
        counts_F[column] = np.count_nonzero(seen_P & wanted_P)
    return counts_F
