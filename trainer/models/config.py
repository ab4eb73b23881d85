"""The job's `model` block. Importable without Paddle."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

KINDS: dict[str, str] = {
    "lr": "trainer.models.lr:LogisticRegression",
    "fm": "trainer.models.fm:FactorizationMachine",
    "deepfm": "trainer.models.deepfm:DeepFM",
}


class ModelConfig(BaseModel):
    """The dense part on top of the embeddings."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    kind: str = "deepfm"
    """Model by name: lr, fm, deepfm."""

    tower: tuple[int, ...] = Field(default=(400, 400, 400))
    """Units of each hidden layer of the tower."""

    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of hidden activations set to zero in training."""
