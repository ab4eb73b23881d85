"""What the tables are after a day, written beside the checkpoints for whoever serves the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from paddlewheel.pserver import delta_chain
from paddlewheel.pserver.messages import Remark
from paddlewheel.pserver.saved_tables import open_table
from paddlewheel.trainer.checkpoint.folder_store import open_address
from paddlewheel.trainer.coordinator.specs import TrainerSpec
from paddlewheel.trainer.protocol.messages import PhaseChanged, Published
from paddlewheel.trainer.worker.agent_channel import AgentChannel


def publish_day(
    spec: TrainerSpec, link: AgentChannel, epoch: int, address: str, num_boundaries: Mapping[str, int]
) -> None:
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
    link.send(PhaseChanged(phase="saving"))
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
                    link.send(Published(table=name, link=added.model_dump(mode="json", exclude={"format"})))
    except (OSError, ValueError, RuntimeError) as error:
        text = f"day {spec.days[epoch]} was not published, the next link will be a base: {error}"
        link.send(Remark(level="error", message=text))
    link.send(PhaseChanged(phase="training"))
