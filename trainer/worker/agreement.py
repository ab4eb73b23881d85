"""What must be the same before training begins: this trainer's inputs and the model's, and those of all trainers."""

from __future__ import annotations

import xxhash

from paddlewheel.data_pipeline.dataset import Dataset
from paddlewheel.data_pipeline.errors import DataError
from paddlewheel.data_pipeline.signature import InputSignature
from paddlewheel.trainer.checkpoint.folder_store import open_address
from paddlewheel.trainer.checkpoint.trained_model import inputs_of, trained_with
from paddlewheel.trainer.coordinator.specs import TrainerSpec
from paddlewheel.trainer.worker.context import WorkerContext
from paddlewheel.trainer.worker.epoch_data import Epochs


def known_inputs(spec: TrainerSpec, epochs: Epochs | None, eval_data: Dataset | None) -> InputSignature:
    """What the model knows of its inputs from here on. epochs: what it trains on, if it does.

    Raises:
        DataError: the data, or what was fitted, is not what the restored checkpoint was trained with.
    """
    seen = []
    if spec.restore is not None:
        store, address = open_address(spec.restore)
        known = inputs_of(store.manifest(address), address)
        seen = [known] if known is not None else []
    if epochs is not None:
        mine = epochs.signature
        for known in seen:
            mine.check(known, trained_with(spec.restore), refitted=spec.resume == "always")
        seen.append(mine)
    inputs = InputSignature.joined(seen)
    if eval_data is not None:
        relation = trained_with(spec.restore) if epochs is None else "in the training data"
        eval_data.signature.check(inputs, relation)
    return inputs


def check_same_inputs(context: WorkerContext, inputs: InputSignature) -> None:
    """Each trainer reads `data.statistics` from a disk of its own. All call this. Raises DataError."""
    mine = xxhash.xxh3_64_intdigest(inputs.identity.encode()) >> 1
    found = context.group.all_gather(mine)
    if len(set(found)) > 1:
        others = ", ".join(f"trainer {rank}: {value:016x}" for rank, value in enumerate(found))
        raise DataError(
            f"data.statistics, or the kinds of columns, are not the same on all trainers ({others}). Copy one "
            f"{context.spec.job.data.statistics or 'data set'} to all of them"
        )


def dense_hash(context: WorkerContext) -> str:
    """Hash of the dense parameters; raises when trainers differ, which the design rules out. All call this."""
    digest = xxhash.xxh3_64()
    for name, value in sorted(context.program.state().items()):
        digest.update(name.encode())
        digest.update(value.tobytes())
    hashes = context.group.all_gather(digest.intdigest() >> 1)
    if len(set(hashes)) > 1:
        raise AssertionError(f"dense parameters differ between trainers: {[f'{h:x}' for h in hashes]}")
    return f"{hashes[0]:016x}"
