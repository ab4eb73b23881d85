"""Rows to be scored: in file order, none left out unseen, with columns handed through beside them.

Unlike `loader`, which makes full batches of usable rows, a block here is a stretch of a file as it is.

Shapes: N rows of a block, B those of them that can be scored.
"""

from __future__ import annotations

import concurrent.futures
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from typing_extensions import Self

from paddlewheel.data_pipeline.assemble import assemble
from paddlewheel.data_pipeline.batch import Batch
from paddlewheel.data_pipeline.config import DataConfig, Shuffle
from paddlewheel.data_pipeline.dataset import Dataset, Slice
from paddlewheel.data_pipeline.encoded_rows import Rows
from paddlewheel.data_pipeline.encoder import Encoder
from paddlewheel.data_pipeline.errors import UnreadableError
from paddlewheel.data_pipeline.quarantine import BadRows
from paddlewheel.data_pipeline.reader import RowGroups
from paddlewheel.data_pipeline.schema import columns_needed
from paddlewheel.data_pipeline.statistics import Fitted


@dataclass(frozen=True)
class Block:
    """Consecutive rows of a file.

    Attributes:
        batch: the rows that can be scored, without labels.
        usable_N: which of the rows these are.
        reasons: why the others cannot be scored, by position.
        carried: columns handed through, all N rows.
    """

    batch: Batch
    usable_N: npt.NDArray[np.bool_]
    reasons: Mapping[int, str]
    carried: Mapping[str, pa.Array]

    @property
    def num_rows(self) -> int:
        return len(self.usable_N)


def scoring_config(config: DataConfig) -> DataConfig:
    """What scoring reads of a job's data: features alone. Labels, weights and groups may be missing, or wrong."""
    without = {
        "labels": (),
        "sample_weight": None,
        "group": None,
        "slice_metrics_by": (),
        "shuffle": Shuffle(enabled=False),
    }
    return config.model_copy(update=without)


class Blocks:
    """Iterator of the blocks of a dataset that was opened with a `scoring_config`; close it, or use it in `with`.

    At most `data.prefetch_batches` blocks of `data.batch_rows` rows are in work. Raises DataError for rows and files
    that cannot be read, unless the job's `on_bad_row` and `on_bad_file` say otherwise.
    """

    def __init__(self, dataset: Dataset) -> None:
        config = dataset.config
        assert not config.labels
        self._dataset, self._config = dataset, config
        self._encoder = Encoder(config, dataset.fitted or Fitted.load(config))
        self._readers = RowGroups(dataset, config, 1)
        self._bad_rows = BadRows(config)
        self._pool = concurrent.futures.ThreadPoolExecutor(max(1, config.threads), "data")
        self._blocks = self._produce()
        self.unreadable: dict[str, str] = {}
        """Files that could not be read to their end (`on_bad_file: skip`), with the reason."""
        self.num_unreadable_rows = 0

    def __iter__(self) -> Iterator[Block]:
        return self._blocks

    def close(self) -> None:
        """Ends the threads and closes the files."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._readers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _produce(self) -> Iterator[Block]:
        working: deque[tuple[Slice, int, dict[str, pa.Array], concurrent.futures.Future[Block]]] = deque()
        limit = min(self._config.prefetch_batches, 2 * max(1, self._config.threads))
        for piece in self._dataset.slices(self._config.batch_rows):
            for start, num_rows, columns in self._read(piece):
                future = self._pool.submit(self._encode, columns, num_rows)
                working.append((piece, start, columns, future))
                if len(working) > limit:
                    yield self._without_bad_rows(*working.popleft())
        while working:
            yield self._without_bad_rows(*working.popleft())

    def _read(self, piece: Slice) -> Iterator[tuple[int, int, dict[str, pa.Array]]]:
        """The rows of a slice: usually all at once, large ones in several pieces."""
        done = 0
        try:
            for start, num_rows, columns in self._readers.pieces(piece, 0, piece.num_rows):
                yield start, num_rows, columns
                done += num_rows
        except UnreadableError as error:
            if self._config.on_bad_file == "fail":
                raise
            self.unreadable.setdefault(self._dataset.files[piece.file].source.name, str(error))
            self.num_unreadable_rows += piece.num_rows - done

    def _encode(self, columns: dict[str, pa.Array], num_rows: int) -> Block:
        rows = Rows.empty(self._config, num_rows)
        reasons = self._encoder.encode(columns, rows, slice(0, num_rows))
        usable_N = ~rows.bad_N
        batch = assemble(self._config, [(rows, np.flatnonzero(usable_N))], num_skipped=len(reasons))
        return Block(batch, usable_N, reasons, {name: columns[name] for name in self._dataset.carried})

    def _without_bad_rows(
        self, piece: Slice, start: int, columns: dict[str, pa.Array], working: concurrent.futures.Future[Block]
    ) -> Block:
        block = working.result()
        needed = {name: columns[name] for name in columns_needed(self._config) if name in columns}
        self._bad_rows.apply_policy(self._dataset, piece, start, block.num_rows, needed, dict(block.reasons))
        return block
