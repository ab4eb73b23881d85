"""The loop reads the wishes while another thread sets them."""

from __future__ import annotations

from typing import Any

from paddlewheel.trainer.loop.train import Signals
from paddlewheel.trainer.protocol.messages import SaveCheckpoint, StopTraining


class Watched(Signals):
    """Looks after every assignment, as the loop might."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if vars(self).get("stop"):
            assert self.save_before_stop, "the loop would leave without the checkpoint"
        assert not vars(self).get("checkpoint"), "the loop would save now, and then leave with rows that are not saved"


def test_a_stop_with_a_checkpoint_is_one_wish() -> None:
    signals = Watched()
    signals.obey(StopTraining(checkpoint=True))
    assert signals.stop


def test_other_commands() -> None:
    signals = Signals()
    signals.obey(SaveCheckpoint())
    assert signals == Signals(checkpoint=True)
    signals.obey(StopTraining(checkpoint=False))
    assert signals == Signals(checkpoint=True, stop=True)
