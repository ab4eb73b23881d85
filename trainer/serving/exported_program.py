"""The dense part of an export, loaded to predict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import paddle
from numpy.typing import NDArray

from paddlewheel.data_pipeline.batch import Batch
from paddlewheel.trainer.dense.inputs import Floats, TableLayout, batch_feed


class ExportedProgram:
    """Prediction as `DenseProgram.save_inference` wrote it; needs nothing of the model's code. Call from one thread."""

    def __init__(self, prefix: Path, layouts: Sequence[TableLayout]) -> None:
        paddle.enable_static()
        self._layouts, self._scope = layouts, paddle.static.Scope()
        self._executor = paddle.static.Executor(paddle.CPUPlace())
        with paddle.static.scope_guard(self._scope):
            self._program, self._inputs, self._outputs = paddle.static.load_inference_model(str(prefix), self._executor)

    def predict(self, batch: Batch, rows: Mapping[str, Floats]) -> Floats:
        """Log-odds [B, Y], as `DenseProgram.predict`."""
        return self.run(batch_feed(self._layouts, batch, rows))

    def run(self, feed: Mapping[str, NDArray[Any]]) -> Floats:
        """Log-odds [B, Y] from arrays by input name; there may be more arrays than inputs."""
        with paddle.static.scope_guard(self._scope):
            logit_BY: Floats = self._executor.run(
                self._program, feed={name: feed[name] for name in self._inputs}, fetch_list=self._outputs[:1]
            )[0]
        return logit_BY
