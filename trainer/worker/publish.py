"""What the tables are after a day, written beside the checkpoints for whoever serves the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from paddlewheel.pserver import delta_chain
from paddlewheel.pserver.saved_tables import open_table
from paddlewheel.trainer.checkpoint.folder_store import open_address
from paddlewheel.trainer.worker.agent_channel import AgentChannel
from paddlewheel.trainer.worker.spec import Spec


def publish_day(spec: Spec, link: AgentChannel, epoch: int, address: str, num_boundaries: Mapping[str, int]) -> None:
    """Adds a link to each table's chain, if the job is by days and publishes. Only trainer 0 does.

    A failure is told, and no reason to end training.

    Args:
        spec: of this trainer.
        link: its agent's.
        epoch: of the day.
        address: the checkpoint of its end.
        num_boundaries: boundaries behind each table.
    """
    job = spec.job
    publisher = job.train.days.publish if job.train.days is not None else None
    if publisher is None or spec.days is None or spec.rank != 0:
        return
    link.event("phase", phase="saving")
    folder = Path(publisher.directory or Path(job.run_dir, "published"))
    try:
        kept, address = open_address(address)
        with kept.local_copy(address) as checkpoint:
            for name in job.data.tables:
                added = delta_chain.append(
                    folder / name,
                    open_table(checkpoint / "sparse" / name),
                    day=spec.days[epoch],
                    num_boundaries=num_boundaries[name],
                    base_every=publisher.base_every_days,
                    dtype=publisher.dtype,
                )
                if added is not None:
                    link.event("published", table=name, **added.model_dump(exclude={"format"}))
    except (OSError, ValueError, RuntimeError) as error:
        text = f"day {spec.days[epoch]} was not published, the next link will be a base: {error}"
        link.event("log", level="error", message=text)
    link.event("phase", phase="training")
