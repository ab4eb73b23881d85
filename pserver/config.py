"""What a user may say about a sparse table. Sizes in floats, rates per update, counts in rows."""

from __future__ import annotations

import math
import re
import zlib
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

# 1, 2, 3, 4 and 6 servers share this number evenly: a checkpoint moves between those as it is. More shards make saves
# slower: each is a file, and Paddle starts a shell for each (about 10 ms). Fewer leave cores of a server without work.
_NUM_SHARDS, _MIN_SHARDS_PER_SERVER = 48, 8

GradientReduction = Literal["sum", "mean"]
Engine = Literal["auto", "paddlewheel", "paddle"]
_WeightBounds = tuple[float, float]


class _Frozen(BaseModel):
    # Settings travel between processes as JSON, which has no infinity: a number that is none would arrive as null.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class _Rule(_Frozen):
    learning_rate: float = Field(gt=0, description="Step size of the rule; unitless.")
    weight_bounds: _WeightBounds = Field(
        default=(-10.0, 10.0),
        description="Lowest and highest change of a weight from its initial value; clipped after each update.",
    )

    @model_validator(mode="after")
    def _bounds_hold_zero(self) -> _Rule:
        low, high = self.weight_bounds
        if not low < 0 < high:
            raise ValueError(f"weight_bounds is [{low}, {high}]: the lower must be below 0 and the upper above 0")
        return self


class Sgd(_Rule):
    """w -= learning_rate * g"""

    rule: Literal["sgd"] = "sgd"
    learning_rate: float = Field(default=0.05, gt=0, description="Step size of the rule; unitless.")
    gradient_reduction: GradientReduction = Field(
        default="sum", description="How the gradients of one key's occurrences in a push become its g: sum or mean."
    )


class AdaGrad(_Rule):
    """w -= learning_rate * g * sqrt(a0 / (a0 + a)); a += mean over the width of g^2. One accumulator a per key."""

    rule: Literal["adagrad"] = "adagrad"
    learning_rate: float = Field(default=0.05, gt=0, description="Step size of the rule; unitless.")
    initial_accumulator: float = Field(
        default=3.0, gt=0, description="a0: how much squared gradient it takes until steps shrink noticeably."
    )
    gradient_reduction: GradientReduction = Field(
        default="mean", description="How the gradients of one key's occurrences in a push become its g: sum or mean."
    )


class AdaGradElementwise(AdaGrad):
    """AdaGrad with one accumulator per element: width + 1 more floats a key instead of 2."""

    rule: Literal["adagrad_elementwise"] = "adagrad_elementwise"  # type: ignore[assignment]


class Adam(_Rule):
    """Adam with both moments per element, and a step count per key (its own updates, not the job's)."""

    rule: Literal["adam"] = "adam"
    learning_rate: float = Field(default=0.001, gt=0, description="Step size of the rule; unitless.")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="Decay of the first moment, per update of the key.")
    beta2: float = Field(default=0.999, ge=0, lt=1, description="Decay of the second moment, per update of the key.")
    epsilon: float = Field(default=1e-8, gt=0, description="Added to the root of the second moment.")
    gradient_reduction: GradientReduction = Field(
        default="sum", description="How the gradients of one key's occurrences in a push become its g: sum or mean."
    )


class AdamShared(Adam):
    """Adam with one pair of moments for all elements of an embedding: 4 more floats a key, not 2 * width + 2."""

    rule: Literal["adam_shared"] = "adam_shared"  # type: ignore[assignment]


Optimizer = Annotated[Sgd | AdaGrad | AdaGradElementwise | Adam | AdamShared, Field(discriminator="rule")]


class TableLifecycle(_Frozen):
    """What a day boundary does to a key. Scores are in the unit of the table's score weights."""

    every_rows: int | None = Field(
        default=None,
        ge=1,
        description="Rows of all trainers between day boundaries, for data without days, those that cannot be used "
        "counted; a step that passes several multiples makes one boundary. null: only `train.days` makes boundaries.",
    )
    show_click_decay: float = Field(
        default=1.0, gt=0, le=1, description="Shows and clicks of every key are multiplied by this at a day boundary."
    )
    delete_below_score: float = Field(
        default=0.0, ge=0, description="A key whose decayed score is below this is deleted at a day boundary."
    )
    delete_after_unseen_days: int | None = Field(
        default=None,
        ge=1,
        description="A key not trained for more than this many day boundaries is deleted; null: never.",
    )

    @property
    def changes_keys(self) -> bool:
        """Whether a day boundary does anything to a key."""
        return self.show_click_decay < 1 or self.delete_below_score > 0 or self.delete_after_unseen_days is not None


class TableConfig(_Frozen):
    """One sparse table: 64-bit key -> first-order weight and embedding."""

    width: int = Field(
        default=16, ge=1, le=4096, description="Floats of an embedding, the first-order weight not counted."
    )
    first_order: bool = Field(
        default=True, description="A trained scalar per key beside its embedding (the linear term)."
    )
    optimizer: Optimizer = Field(default_factory=AdaGrad, description="The update rule that the server applies.")
    initial_range: float = Field(
        default=0.01, ge=0, description="Initial embeddings are uniform in [-initial_range, initial_range)."
    )
    unclicked_weight: float = Field(default=1.0, ge=0, description="Score of a show without a click.")
    clicked_weight: float = Field(default=1.0, ge=0, description="Score of a show with a click.")
    admission_threshold: int | None = Field(
        default=None,
        ge=1,
        le=2**31,
        description="Score from which a key has an embedding; below, only a first-order weight. null: from the start.",
    )
    lifecycle: TableLifecycle = Field(
        default_factory=TableLifecycle, description="Decay and eviction at day boundaries."
    )
    train_new_keys: bool = Field(
        default=False,
        description="Whether the push that creates a key's embedding trains it, too; Paddle's table does not.",
    )
    train_below_admission: bool = Field(
        default=True, description="Whether a key below `admission_threshold` has its first-order weight trained."
    )
    l2: float = Field(
        default=0.0,
        ge=0,
        description="Factor of a weight's true value (initial value and change) in its gradient, at each push of its "
        "key.",
    )
    max_keys: int | None = Field(
        default=None,
        ge=1000,
        description="Most keys that all servers together hold; when they are full, keys with the lowest score go, of "
        "equal ones those unseen for longest. null: no bound.",
    )
    memory_gib: float | None = Field(
        default=None,
        gt=0,
        description="The same as `max_keys`, as GiB of memory of rows and their index in all servers together. With "
        "`spill`, no key goes: so much memory holds the index and hot rows; null: a quarter of a server's memory.",
    )
    spill: str | None = Field(
        default=None,
        pattern=r"^/.*",
        description="Folder on a local disk of each server for a file that holds the rows that are not hot; see "
        "`memory_gib`. null: all in memory.",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="How servers keep embeddings: bfloat16 takes half the memory, rounds at random so that small steps "
        "add up, and needs the engine paddlewheel.",
    )
    engine: Engine = Field(
        default="auto",
        description="Whose table holds the rows in the servers: paddlewheel or paddle; auto: ours where it works, "
        "else Paddle's.",
    )
    shards: int | None = Field(
        default=None,
        ge=1,
        le=10_000,
        description="Parts of the table; a multiple of the number of servers. null: chosen.",
    )

    @model_validator(mode="after")
    def _something_scores(self) -> TableConfig:
        if not self.unclicked_weight + self.clicked_weight:
            raise ValueError("unclicked_weight and clicked_weight are both 0: then no key ever has a score")
        return self

    @model_validator(mode="after")
    def _paddle_can(self) -> TableConfig:
        beyond = self.beyond_paddle
        if self.engine == "paddle" and beyond:
            name = beyond[0]
            raise ValueError(
                f"{name} is {getattr(self, name)!r}, which Paddle's table cannot do: leave it or engine out"
            )
        return self

    @property
    def is_ours_for_sure(self) -> bool:
        """Whether servers that run hold this table in our own engine: a server that cannot does not start."""
        return self.engine == "paddlewheel" or bool(self.beyond_paddle)

    @property
    def beyond_paddle(self) -> tuple[str, ...]:
        """The fields whose values only our own engine can serve."""
        plain = {
            "train_new_keys": False,
            "train_below_admission": True,
            "l2": 0.0,
            "max_keys": None,
            "memory_gib": None,
            "spill": None,
            "dtype": "float32",
        }
        return tuple(name for name, value in plain.items() if getattr(self, name) != value)

    @property
    def pull_width(self) -> int:
        """Floats of one pulled row: the first-order weight, if the table has one, then the embedding."""
        return self.width + self.first_order

    def num_shards(self, num_servers: int) -> int:
        """Parts of the table on this many servers: always a multiple of it, or the last server would get too few."""
        if self.shards is None:
            least = max(_NUM_SHARDS, _MIN_SHARDS_PER_SERVER * num_servers)
            step = math.lcm(_NUM_SHARDS, num_servers)
            even, next_best = step * -(-least // step), num_servers * -(-least // num_servers)
            return even if even < 2 * least else next_best
        if self.shards % num_servers:
            lower = self.shards // num_servers * num_servers
            raise ValueError(
                f"shards is {self.shards}, which is no multiple of the {num_servers} servers: "
                f"use {lower or num_servers} or {lower + num_servers}, or leave it out"
            )
        return self.shards


# A table's name becomes a folder in every checkpoint, and Paddle's servers hand that folder to a shell unquoted.
_TABLE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}")


def check_table_name(name: str) -> str:
    """The name, if a table may have it. Raises ValueError."""
    if not _TABLE_NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} cannot be a table's name: tables are folders in every checkpoint and export. Take at most 63 "
            "ASCII letters, digits, . _ - and begin with a letter, a digit or _"
        )
    return name


TableName = Annotated[
    str, AfterValidator(check_table_name), WithJsonSchema({"type": "string", "pattern": f"^{_TABLE_NAME.pattern}$"})
]
Tables = dict[TableName, TableConfig]


def table_id(name: str) -> int:
    """The number under which servers know a table: made from its name, so that adding tables moves no files."""
    return zlib.crc32(name.encode()) & 0x7FFF_FFFF


def table_ids(tables: Tables) -> dict[str, int]:
    """table_id of every table; ValueError for a name that no table may have, or if (improbable) two share an id."""
    ids = {check_table_name(name): table_id(name) for name in tables}
    by_id: dict[int, str] = {}
    for name, number in ids.items():
        if number in by_id:
            raise ValueError(f"tables {by_id[number]!r} and {name!r} have names with the same checksum: rename one")
        by_id[number] = name
    return ids
