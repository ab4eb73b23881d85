"""Which table holds the rows in a server: ours (`pserver.native`) or Paddle's own.

`tables.*.engine` chooses: `paddlewheel`, `paddle`, or `auto`, which is ours where it works and Paddle's elsewhere.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from paddlewheel.pserver import initializer, native, paddle_core, row_parts
from paddlewheel.pserver.config import AdaGrad, Adam, TableConfig, Tables, table_ids

_RULES = {"sgd": 0, "adagrad": 1, "adagrad_elementwise": 2, "adam": 3, "adam_shared": 4}
_NEVER_DAYS = 1e30
_MAX_INDEX_BYTES = 10  # native/index.h: entries of 4 bytes, at 40 % load or more


class Chosen(NamedTuple):
    """Tables that are ours, and why others are not although they might be."""

    ours: frozenset[str]
    warning: str


def options(
    name: str,
    config: TableConfig,
    *,
    num_servers: int = 1,
    rank: int = 0,
    seed: int = 0,
    logs_removed: bool = False,
) -> dict[str, native.OptionValue]:
    """What our table is told about itself (options.h), which rounds to float32 what Paddle's keeps in it.

    logs_removed: it remembers, until the next whole save, which keys it has deleted, for saves of changes.
    """
    optimizer, life = config.optimizer, config.lifecycle
    found: dict[str, native.OptionValue] = {
        "table": table_ids({name: config})[name],
        "width": config.width,
        "shards": config.num_shards(num_servers),
        "server": rank,
        "servers": num_servers,
        "rule": _RULES[optimizer.rule],
        "learning_rate": optimizer.learning_rate,
        "low": optimizer.weight_bounds[0],
        "high": optimizer.weight_bounds[1],
        "unclicked": config.unclicked_weight,
        "clicked": config.clicked_weight,
        "admission": (float(config.admission_threshold or 0),),
        "decay": life.show_click_decay,
        "delete_below": life.delete_below_score,
        "half": config.dtype == "bfloat16",
        "train_created": config.train_new_keys,
        "train_unadmitted": config.train_below_admission,
        "l2": config.l2,
        "initial_range": config.initial_range,
        "initial_state": initializer.generator_state(name, seed),
        "max_rows": max_rows(config) // num_servers,
        "log_removed": logs_removed,
        "delete_unseen": float(_NEVER_DAYS if life.delete_after_unseen_days is None else life.delete_after_unseen_days),
    }
    if config.spill is not None:
        found |= {"spill": config.spill, "memory": hot_bytes(config, num_servers) // num_servers}
    if isinstance(optimizer, AdaGrad):
        found["initial_accumulator"] = optimizer.initial_accumulator
    if isinstance(optimizer, Adam):
        found |= {"beta1": optimizer.beta1, "beta2": optimizer.beta2, "epsilon": optimizer.epsilon}
    return found


def max_rows(config: TableConfig) -> int:
    """Rows of the whole table at which keys have to go; 0: none."""
    bounds = [] if config.max_keys is None else [config.max_keys]
    if config.memory_gib is not None and config.spill is None:
        bounds.append(int(config.memory_gib * (1 << 30) / memory_bytes(config)))
    return max(1, min(bounds)) if bounds else 0


def hot_bytes(config: TableConfig, num_servers: int) -> int:
    """Memory of index and hot rows of a table whose other rows are spilled, in all servers together."""
    if config.memory_gib is not None:
        return int(config.memory_gib * (1 << 30))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4 * num_servers


def memory_bytes(config: TableConfig) -> int:
    """Memory of a key in our engine: its row, and its place in an index that is at its emptiest."""
    return row_parts.row_type(config).itemsize + _MAX_INDEX_BYTES


def choose(tables: Tables, *, num_servers: int, rank: int, seed: int = 0, logs_removed: bool = False) -> Chosen:
    """Register our table for those that are to be ours, in a process that has not yet started Paddle's server.

    logs_removed: see `options`.

    Raises NativeError when a table insists on our engine and it cannot be had.
    """
    from paddlewheel.pserver.descriptor import rule_description

    wanted = {name: config for name, config in tables.items() if config.engine != "paddle"}
    if not wanted:
        return Chosen(frozenset(), "")
    core, _ = paddle_core.load()
    try:
        native.register(
            {
                name: options(name, config, num_servers=num_servers, rank=rank, seed=seed, logs_removed=logs_removed)
                for name, config in wanted.items()
            },
            {name: rule_description(config) for name, config in wanted.items()},
            core,
        )
    except native.NativeError as error:
        for name, config in wanted.items():
            for field in ("engine",) if config.engine == "paddlewheel" else config.beyond_paddle:
                raise native.NativeError(
                    f"tables.{name}.{field} is {getattr(config, field)!r}, which needs our own engine, but: {error}"
                ) from error
        return Chosen(frozenset(), f"tables are Paddle's own, which need more memory and time: {error}")
    return Chosen(frozenset(wanted), "")
