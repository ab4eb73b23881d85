"""The job's `train` and `warm_start` blocks. Importable without Paddle."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from typing_extensions import Self

from paddlewheel.trainer.job.days import DaysConfig


def logit_shift(config: NegativeSamplingConfig | None) -> float:
    """What predictions need added to their log-odds: q = p / (p + (1 - p) / keep), as log-odds."""
    return math.log(config.keep) if config is not None and config.correction == "shift" else 0.0


Metric = Literal[
    "auc",
    "weighted_auc",
    "gauc",
    "gauc_by_clicks",
    "logloss",
    "weighted_logloss",
    "normalised_entropy",
    "calibration_error",
]


HIGHER_IS_BETTER = frozenset({"auc", "weighted_auc", "gauc", "gauc_by_clicks"})


NEEDS = {"gauc": "data.group", "weighted_": "data.sample_weight"}
"""What the job must give for metrics whose name begins so."""


class EvaluationConfig(BaseModel):
    """Evaluations during training. All trainers pause for them; each sees its share of the rows."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    every_steps: int | None = Field(default=None, ge=1)
    """Steps between evaluations. None: not by steps."""

    every_epochs: int | None = Field(default=None, ge=1)
    """Epochs between evaluations. None: not by epochs. The last epoch's end is always evaluated."""

    metric: Metric = "auc"
    """What "better" means. `gauc` needs `data.group`, `weighted_` needs `data.sample_weight`."""

    save_best: bool = False
    """Keep a checkpoint of the best evaluation beside the newest ones, and name it in the result."""

    patience: int | None = Field(default=None, ge=1)
    """Stop after this many evaluations in a row without improvement. None: train all epochs."""

    min_delta: float = Field(default=0.0, ge=0)
    """Least difference to the best value that counts as an improvement, in the metric's own unit."""

    @model_validator(mode="after")
    def _evaluates_when_it_must(self) -> Self:
        if (self.save_best or self.patience) and self.every_steps is None and self.every_epochs is None:
            raise ValueError("evaluation: save_best and patience need every_steps or every_epochs")
        return self


class ScheduleConfig(BaseModel):
    """Warm-up, then decay, as a factor on the learning rate. The default is a constant 1."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the rate rises linearly from nearly 0 (Goyal et al., 2017)."""

    decay: Literal["none", "linear", "cosine", "exponential"] = "none"
    """Shape of the way down. `exponential` loses the same share in every step."""

    decay_steps: int | None = Field(default=None, ge=1)
    """Steps from the end of the warm-up until `final_factor` is reached, and kept. None: the rest of the run."""

    final_factor: float = Field(default=0.0, ge=0, le=1)
    """Factor at the end of the decay."""

    @model_validator(mode="after")
    def _exponential_ends_above_zero(self) -> Self:
        if self.decay == "exponential" and self.final_factor == 0:
            raise ValueError("schedule: decay exponential never reaches 0: give final_factor, for example 0.01")
        return self


WireType = Literal["float32", "bfloat16", "float16"]


class DenseOptimizerConfig(BaseModel):
    """Adam on the dense parameters, the same on every trainer (Kingma and Ba, 2015; Loshchilov and Hutter, 2019)."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    learning_rate: float = Field(default=1e-3, gt=0)
    """Step size."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment per step."""

    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the second moment per step."""

    epsilon: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled decay of weight matrices (not of biases), per step and relative to the learning rate."""

    l2: float = Field(default=0.0, ge=0)
    """L2 penalty on weight matrices (not on biases): l2 / 2 * their squares, added to the mean loss."""

    clip_norm: float | None = Field(default=None, gt=0)
    """Largest norm of the whole dense gradient, of all trainers' rows together; a larger one is scaled down to it."""

    schedule: ScheduleConfig = ScheduleConfig()
    """Warm-up and decay of the learning rate. Tables keep theirs: the servers hold it."""


class NegativeSamplingConfig(BaseModel):
    """Which rows without a click are trained on, and how the click rate is put right again."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    keep: float = Field(gt=0, le=1)
    """Share of the rows with a first label of 0 that are trained on; drawn anew in each epoch. Other rows all stay."""

    correction: Literal["shift", "weight"] = "shift"
    """`shift`: predictions get log(keep) added to their log-odds (He et al., 2014, section 6.3). `weight`: kept rows
    count 1 / keep times in the loss, which needs no shift and gives noisier steps."""


class TrainConfig(BaseModel):
    """How the job trains."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    epochs: int = Field(default=1, ge=1)
    """Passes over the training data."""

    days: DaysConfig | None = None
    """Train day by day, each day once, with a day boundary of the tables after each. None: in epochs."""

    dense_optimizer: DenseOptimizerConfig = DenseOptimizerConfig()
    """Optimizer of the dense parameters."""

    evaluation: EvaluationConfig = EvaluationConfig()
    """Evaluations during training, and what follows from them."""

    start_at_label_rate: bool = True
    """Begin with output biases under which the mean prediction is the label's rate, counted on up to 65,536 rows of the
    training data before the first step. A job that goes on, or begins with another's dense part, keeps what it has."""

    negative_sampling: NegativeSamplingConfig | None = None
    """Train on a share of the rows without a click. None: on all rows."""

    scheduled_tables: bool = False
    """Whether the learning rates of tables follow `dense_optimizer.schedule`, too. Needs tables of the engine
    `paddlewheel`: those of Paddle have a fixed one."""

    embedding_l2: float = Field(default=0.0, ge=0)
    """L2 penalty on first-order weights and embeddings, per occurrence of a key in a row."""

    max_staleness_steps: int = Field(default=1, ge=0)
    """How many steps pulled embeddings may lag behind the newest push. 0: every step waits for the push before it."""

    device: Literal["cpu", "gpu"] = "cpu"
    """Where the dense part is computed. `gpu`: one NVIDIA GPU a trainer, after `paddlewheel gpu build` on its
    machine; pulls and pushes stay on the CPU."""

    cpu_backend: Literal["auto", "native", "paddle"] = "auto"
    """Who computes the dense part on a CPU. `native`: our compiled operators, refused where they cannot be had;
    `paddle`: Paddle's alone; `auto`: ours where they can be had."""

    precision: Literal["auto", "float32", "tfloat32", "bfloat16", "float16"] = "auto"
    """Factors of the dense part's matrix products; parameters, sums and the optimizer are float32 in any case. CPU:
    `bfloat16` needs the native operators and a processor that has it (AVX512-BF16, AMX), `auto` takes it there. GPU:
    `auto`: bfloat16 from compute capability 8.0 on, float16 (with a scaled loss) below; `tfloat32` as bfloat16."""

    allreduce_dtype: WireType = "float32"
    """What dense gradients are rounded to on their way between trainers; sums are float32, and what rounding leaves
    over is added to the next step's gradient. `bfloat16` halves the bytes, for slow networks (docs/measurements has
    figures); `float16` has more digits and takes longer to compute. For trainers on CPUs; with one of them nothing is
    rounded."""

    max_nonfinite_steps: int = Field(default=10, ge=0)
    """Steps with a loss or gradient that is not finite are skipped; more of them than this, over all
    restarts, stop the job with code 64: `paddlewheel train` goes on from the last checkpoint, with its count."""


class WarmStartConfig(BaseModel):
    """Begin with vectors, and perhaps the dense part, of another job. Once: a job that goes on does not begin again."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    source: str = Field(min_length=1)
    """An export, a checkpoint (its `step-<n>` folder), or a folder of checkpoints, of which the newest is taken. All
    trainers must see it; `paddlewheel checkpoint fetch` makes a folder of what is in an object store."""

    tables: dict[str, str] | None = None
    """Which tables begin with which of the source: `{mine: theirs}`; others start fresh. None: those of equal name."""

    dense: bool = False
    """Also begin with the source's dense parameters; model, features and dense columns must then be the same. The
    optimizer's moments and the learning-rate schedule start anew."""
