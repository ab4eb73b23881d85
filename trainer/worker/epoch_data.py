"""What the epochs of a job read: all the training data again and again, or one day after the other."""

from __future__ import annotations

from collections.abc import Mapping

from paddlewheel.data_pipeline.dataset import Dataset
from paddlewheel.data_pipeline.signature import InputSignature


class Epochs:
    """Datasets by epoch, and how much there is in all.

    Args:
        datasets: of every epoch from the first that this run may train.
        num_epochs: of the job, those trained by earlier runs included.
        rows_before: rows of the epochs before the first of `datasets`.
    """

    def __init__(self, datasets: Mapping[int, Dataset], num_epochs: int, rows_before: int = 0) -> None:
        self.num_epochs = num_epochs
        self._datasets, self._rows_before = datasets, rows_before

    def __getitem__(self, epoch: int) -> Dataset:
        return self._datasets[epoch]

    @property
    def num_rows(self) -> int:
        """Rows of all epochs together."""
        return self._rows_before + sum(dataset.num_rows for dataset in self._datasets.values())

    @property
    def signature(self) -> InputSignature:
        """What a model that trains on them knows of its inputs."""
        return InputSignature.joined(dataset.signature for dataset in self._datasets.values())

    def num_steps(self, rows_per_step: int) -> int:
        """Steps of all epochs, about; the same number on every trainer."""
        steps = sum(-(-dataset.num_rows // rows_per_step) for dataset in self._datasets.values())
        return -(-self._rows_before // rows_per_step) + steps
