"""Paddle's description of the tables (a PSParameter in text form), made from TableConfigs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddlewheel.pserver import paddle_core
from paddlewheel.pserver.config import AdaGrad, Adam, TableConfig, Tables, table_ids
from paddlewheel.pserver.native import TABLE_CLASS

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

_RULES = {
    "sgd": "SparseNaiveSGDRule",
    "adagrad": "SparseAdaGradSGDRule",
    "adagrad_elementwise": "StdAdaGradSGDRule",
    "adam": "SparseAdamSGDRule",
    "adam_shared": "SparseSharedAdamSGDRule",
}
_NEVER_DAYS = 1e30


def describe(
    tables: Tables,
    num_servers: int,
    *,
    num_trainers: int = 1,
    worker: bool = False,
    gflags: Sequence[str] = (),
    ours: Collection[str] = (),
) -> str:
    """PSParameter text for `init_server`, or (worker=True) for Paddle's own `init_worker`.

    ours: tables whose class is `native.TABLE_CLASS`, which must be registered.
    gflags: Paddle's own flags, e.g. "-pserver_table_save_max_retry=1" (brpc's flags are ignored without a word).
    """
    from google.protobuf import text_format

    _, pb = paddle_core.load()
    if num_servers < 1:
        raise ValueError(f"num_servers is {num_servers}: at least 1 is needed")
    ps = pb.PSParameter()
    ps.init_gflags = " ".join(gflags)
    sides = [ps.server_param.downpour_server_param.downpour_table_param]
    if worker:
        sides.append(ps.worker_param.downpour_worker_param.downpour_table_param)
    for side in sides:
        for name, number in table_ids(tables).items():
            table = side.add()
            _describe_table(table, name, number, tables[name], num_servers, num_trainers, pb.PS_SPARSE_TABLE)
            if name in ours:
                table.table_class = TABLE_CLASS
    service = ps.server_param.downpour_server_param.service_param
    service.server_class, service.client_class, service.service_class = "BrpcPsServer", "BrpcPsClient", "BrpcPsService"
    service.start_server_port, service.server_thread_num = 0, 12
    return str(text_format.MessageToString(ps))


def _describe_table(
    table: Any, name: str, number: int, config: TableConfig, num_servers: int, num_trainers: int, kind: int
) -> None:
    table.table_id, table.table_class, table.type = number, "MemorySparseTable", kind
    table.shard_num = config.num_shards(num_servers)
    table.compress_in_save = False  # gzip takes three times as long
    accessor = table.accessor
    accessor.accessor_class = "CtrCommonAccessor"  # a pull returns [show, click, first-order weight, embedding...]
    accessor.fea_dim = config.width + 3
    accessor.embedx_dim = config.width
    accessor.embedx_threshold = config.admission_threshold or 0
    ctr = accessor.ctr_accessor_param
    ctr.nonclk_coeff, ctr.click_coeff = config.unclicked_weight, config.clicked_weight
    ctr.base_threshold = ctr.delta_threshold = 0
    ctr.delta_keep_days = _NEVER_DAYS
    ctr.ssd_unseenday_threshold = 1
    life = config.lifecycle
    ctr.show_click_decay_rate = life.show_click_decay
    ctr.delete_threshold = life.delete_below_score
    ctr.delete_after_unseen_days = (
        _NEVER_DAYS if life.delete_after_unseen_days is None else life.delete_after_unseen_days
    )
    ctr.show_scale = False  # the client has divided by the occurrences already, where the optimizer asks for it
    ctr.zero_init = True
    for rule in (accessor.embed_sgd_param, accessor.embedx_sgd_param):
        _describe_rule(rule, config)
    common = table.common
    common.name, common.table_name, common.trainer_num, common.sync, common.entry = (
        "sgd",
        name,
        num_trainers,
        False,
        "none",
    )


def _describe_rule(rule: Any, config: TableConfig) -> None:
    optimizer = config.optimizer
    rule.name = _RULES[optimizer.rule]
    for part in (rule.naive, rule.adagrad, rule.adam):
        part.learning_rate = optimizer.learning_rate
        part.initial_range = 0.0  # the table stores changes from an initial vector that the client knows
        part.weight_bounds.extend(optimizer.weight_bounds)
    if isinstance(optimizer, AdaGrad):
        rule.adagrad.initial_g2sum = optimizer.initial_accumulator
    if isinstance(optimizer, Adam):
        rule.adam.beta1_decay_rate, rule.adam.beta2_decay_rate = optimizer.beta1, optimizer.beta2
        rule.adam.ada_epsilon = optimizer.epsilon


def rule_description(config: TableConfig) -> tuple[str, bytes]:
    """Name and description (a serialised SparseCommonSGDRuleParameter) of Paddle's update rule for a table."""
    _, pb = paddle_core.load()
    rule = pb.SparseCommonSGDRuleParameter()
    _describe_rule(rule, config)
    return rule.name, rule.SerializeToString()
