"""Initial embeddings that every process computes alike from (seed, table, key), without asking a server.

Paddle's servers draw initial values from generators that no seed controls. So servers start every key at 0 and store
the *change*; the effective embedding is initial(key) + change. initial(key) is a row of a codebook of 65,536 vectors,
chosen by the key's low 16 bits (keys are mixed, so neighbours in meaning are not neighbours here).
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from paddlewheel.pserver.config import TableConfig

_NUM_ROWS = 1 << 16
_ROW_MASK = np.uint64(_NUM_ROWS - 1)


def admitted(
    config: TableConfig,
    shows_U: npt.NDArray[np.float32],
    clicks_U: npt.NDArray[np.float32],
    class_U: npt.NDArray[np.uint8] | None = None,
) -> npt.NDArray[np.bool_]:
    """Which keys have an embedding: those whose score reaches the admission score; in float32, as on the server.

    class_U: whose threshold is which of `TableConfig.admission_thresholds`; None: the table's own for all.
    """
    if not config.has_admission:
        return np.ones(len(shows_U), np.bool_)
    score_U = (shows_U - clicks_U) * np.float32(config.unclicked_weight)
    score_U += clicks_U * np.float32(config.clicked_weight)
    least_C = np.array([-np.inf if t is None else t for t in config.admission_thresholds], np.float32)
    return np.asarray(score_U >= (least_C[0] if class_U is None else least_C[class_U]))


class Initializer:
    """The initial embeddings of one table, and which keys have an embedding."""

    def __init__(self, table: str, config: TableConfig, seed: int) -> None:
        self._config = config
        self._first_order = int(config.first_order)
        # A column of zeros in front makes one contiguous row of a pulled row, which is ten times faster to add.
        self._rows_RW = np.zeros((_NUM_ROWS, config.pull_width), np.float32)
        self._rows_RW[:, self._first_order :] = codebook(table, config.width, config.initial_range, seed)

    def admitted(
        self,
        shows_U: npt.NDArray[np.float32],
        clicks_U: npt.NDArray[np.float32],
        class_U: npt.NDArray[np.uint8] | None = None,
    ) -> npt.NDArray[np.bool_]:
        """See the function of this name."""
        return admitted(self._config, shows_U, clicks_U, class_U)

    def new_embeddings(self) -> npt.NDArray[np.float32]:
        """float32 [65536, K]: the initial embedding of a key is row `key mod 65536`."""
        return self._rows_RW[:, self._first_order :].copy()

    def effective(
        self,
        change_UW: npt.NDArray[np.float32],
        keys_U: npt.NDArray[np.uint64],
        admitted_U: npt.NDArray[np.bool_],
    ) -> npt.NDArray[np.float32]:
        """A new array of effective values: initial vectors plus changes; embedding 0 where not admitted."""
        values_UW: npt.NDArray[np.float32] = self._rows_RW.take((keys_U & _ROW_MASK).astype(np.intp), 0, mode="clip")
        values_UW += change_UW
        if self._config.has_admission:
            values_UW[~admitted_U, self._first_order :] = 0
        return values_UW


def codebook(table: str, width: int, initial_range: float, seed: int) -> npt.NDArray[np.float32]:
    """float32 [65536, width], uniform in [-initial_range, initial_range): the same on every platform and numpy version.

    Element i (row-major) is splitmix64's output i of the state (seed, table): Steele, Lea, Flood 2014, with its 24 high
    bits as the fraction.
    """
    start = np.array([generator_state(table, seed)], np.uint64)
    with np.errstate(over="ignore"):
        state = start + np.arange(1, _NUM_ROWS * width + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    fraction = (_splitmix64(state) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
    return ((fraction * 2 - 1) * np.float32(initial_range)).reshape(_NUM_ROWS, width)


def generator_state(table: str, seed: int) -> int:
    """The state from which the numbers of a table's codebook count on."""
    return int(_splitmix64(np.array([(seed & (1 << 64) - 1) ^ (zlib.crc32(table.encode()) << 32)], np.uint64))[0])


def _splitmix64(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The output function of splitmix64."""
    z = state
    with np.errstate(over="ignore"):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
