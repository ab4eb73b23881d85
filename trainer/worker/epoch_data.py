"""What the epochs of a job read: all the training data again and again, or one day after the other."""

from __future__ import annotations

from collections.abc import Mapping

from paddlewheel.data_pipeline.config import DataConfig
from paddlewheel.data_pipeline.dataset import Dataset
from paddlewheel.data_pipeline.days import open_days, parse_day
from paddlewheel.data_pipeline.signature import InputSignature
from paddlewheel.trainer.checkpoint.folder_store import open_address
from paddlewheel.trainer.coordinator.specs import TrainerSpec
from paddlewheel.trainer.job.config import JobConfig


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


def training_columns(job: JobConfig) -> DataConfig:
    """What training reads: not the columns that only evaluation reports by."""
    return job.data.model_copy(update={"slice_metrics_by": ()})


def open_epochs(spec: TrainerSpec) -> Epochs:
    """What there is to train on, from the epoch on that a restored checkpoint stands in.

    Raises:
        DataError: it cannot be read, or is not as the job says.
    """
    job, data = spec.job, training_columns(spec.job)
    first, rows_before = 0, 0
    if spec.restore is not None:
        store, address = open_address(spec.restore)
        cursor = store.cursor(address)
        first = int(cursor["position"]["epoch"])
        rows_before = cursor["rows"] - sum(rows for _, rows in cursor["position"]["done"])
    if spec.days is None:
        whole = Dataset.open(job.data.train, data)
        return Epochs(dict.fromkeys(range(job.train.epochs), whole), job.train.epochs)
    assert job.train.days is not None
    left = {parse_day(day): first + number for number, day in enumerate(spec.days[first:])}
    found = open_days(job.data.train, data, job.train.days.column, left) if left else {}
    return Epochs({left[day]: dataset for day, dataset in found.items()}, len(spec.days), rows_before)
