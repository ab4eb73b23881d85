import pytest
from pydantic import TypeAdapter, ValidationError

from paddlewheel.pserver import config as config_module
from paddlewheel.pserver.config import Adam, TableConfig, table_id, table_ids


def test_defaults():
    table = TableConfig()
    assert (table.width, table.pull_width, table.optimizer.rule, table.admission_threshold) == (16, 17, "adagrad", None)
    assert TableConfig(first_order=False).pull_width == 16


@pytest.mark.parametrize(
    ("num_servers", "expected"),
    [(1, 48), (2, 48), (3, 48), (5, 50), (6, 48), (8, 96), (16, 144), (17, 136), (32, 288), (100, 1200)],
)
def test_chosen_shards_are_a_multiple_of_the_servers(num_servers, expected):
    assert TableConfig().num_shards(num_servers) == expected


def test_given_shards_must_be_a_multiple_of_the_servers():
    assert TableConfig(shards=12).num_shards(4) == 12
    with pytest.raises(ValueError, match="use 10 or 15"):
        TableConfig(shards=12).num_shards(5)
    with pytest.raises(ValueError, match="use 16 or 16"):
        TableConfig(shards=12).num_shards(16)


@pytest.mark.parametrize(
    "bad",
    [
        {"width": 0},
        {"widht": 4},
        {"optimizer": {"rule": "adagrad", "beta1": 0.9}},
        {"optimizer": {"rule": "ftrl"}},
        {"optimizer": {"rule": "sgd", "learning_rate": 0}},
        {"optimizer": {"rule": "sgd", "weight_bounds": [0.1, 1]}},
        {"admission_threshold": 0},
        {"admission_threshold": 3, "unclicked_weight": 0.0, "clicked_weight": 0.0},
        {"lifecycle": {"show_click_decay": 0}},
        {"admission_by_feature": {"user": 0}},
        {"admission_by_feature": {f"f{i}": 2 for i in range(64)}},
    ],
)
def test_what_makes_no_sense_is_refused(bad):
    with pytest.raises(ValidationError):
        TableConfig.model_validate(bad)


def test_thresholds_by_feature_are_not_for_paddles_table():
    given = {"admission_threshold": 3, "admission_by_feature": {"user": 5, "item": None}}
    table = TableConfig(**given)
    assert table.admission_thresholds == (3, 5, None)
    assert table.is_ours_for_sure
    with pytest.raises(ValidationError, match="keeps one threshold: give such a feature a table of its own"):
        TableConfig(engine="paddle", **given)


def test_rules_are_told_apart_and_survive_json():
    for rule in ("sgd", "adagrad", "adagrad_elementwise", "adam", "adam_shared"):
        table = TableConfig.model_validate({"optimizer": {"rule": rule, "learning_rate": 0.25}})
        assert table.optimizer.rule == rule
        assert TableConfig.model_validate_json(table.model_dump_json()) == table
    assert isinstance(TableConfig(optimizer={"rule": "adam_shared"}).optimizer, Adam)


def test_every_field_is_described():
    def fields(schema):
        for name, definition in schema.get("$defs", {}).items():
            yield from ((f"{name}.{k}", v) for k, v in definition.get("properties", {}).items() if k != "rule")
        yield from schema["properties"].items()

    undescribed = [name for name, field in fields(TableConfig.model_json_schema()) if not field.get("description")]
    assert not undescribed


def test_table_ids_never_change():
    """They are the names of folders in checkpoints."""
    assert (table_id("default"), table_id("item")) == (1667104991, 521872670)


def test_two_names_with_one_id_are_refused(monkeypatch):
    monkeypatch.setattr(config_module, "table_id", lambda _: 7)
    with pytest.raises(ValueError, match="'a' and 'b'"):
        table_ids({"a": TableConfig(), "b": TableConfig()})


def test_tables_are_a_dictionary():
    tables = TypeAdapter(config_module.Tables).validate_python({"a": {}, "b": {"width": 3}})
    assert tables["b"].width == 3
