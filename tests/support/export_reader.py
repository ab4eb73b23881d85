"""Reads an exported model as trainer/serving/EXPORT.md describes it: row by row, with none of paddlewheel's code."""

from __future__ import annotations

import datetime as dt
import json
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import xxhash

MASK = (1 << 64) - 1
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def nonzero(key: int) -> int:
    return key or 0x9E3779B97F4A7C15


def combine(a: int, b: int) -> int:
    folded = mix(a)
    turned = ((folded << 23) | (folded >> 41)) & MASK
    return nonzero(mix((turned + b * 0x9E3779B185EBCA87) & MASK))


def value_key(value: Any, seed: int, rule: dict[str, Any]) -> int:
    kind, offset = rule["value_type"], rule["offset"]
    if kind == "string" and not isinstance(value, (str, bytes)):
        value = str(value).lower() if isinstance(value, bool) else str(value)
    if kind == "integer" and isinstance(value, (str, bytes)):
        value = int(value)
    if isinstance(value, Decimal):
        if value == value.to_integral_value() and -(1 << 63) <= value < 1 << 64:
            value, offset = int(value), 0
        else:
            value = format(value.normalize(), "f")
    if isinstance(value, dt.datetime):
        value = (value.replace(tzinfo=dt.timezone.utc) - EPOCH) // dt.timedelta(microseconds=1)
        offset = 0
    elif isinstance(value, dt.date):
        value = (value - EPOCH.date()).days
    if isinstance(value, (str, bytes)):
        raw = value.encode() if isinstance(value, str) else value
        return nonzero(xxhash.xxh64_intdigest(raw, seed))
    return nonzero(mix(((int(value) + offset) ^ seed) & MASK))


def bucket(value: float, rule: dict[str, Any]) -> int:
    value = max(-1e15, min(1e15, float(value)))
    if rule["kind"] == "borders":
        return sum(border <= value for border in rule["borders"])
    return math.floor(math.log(value) ** 2) if value > 2 else math.floor(value)


class Reader:
    """An export, read into dictionaries."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.spec = json.loads((directory / "export.json").read_text())
        assert self.spec["format"] == 1
        self.vocabularies: dict[str, set[int]] = {}
        for rule in self.spec["inputs"]["features"]:
            if rule["vocabulary"]:
                rows = pq.read_table(directory / rule["vocabulary"]["file"]).to_pylist()
                self.vocabularies[rule["name"]] = {row["key"] for row in rows if row["feature"] == rule["name"]}

    def keys(self, rule: dict[str, Any], row: dict[str, Any]) -> tuple[list[int], list[float]]:
        """Keys of one row, 0 for no id of a single-valued feature, and their weights."""
        missing = int(rule["missing_key"], 16)
        if rule["max_length"] is None:
            values = [row.get(column) for column in rule["columns"]]
            if any(value is None or (rule["buckets"] and math.isnan(value)) for value in values):
                return [missing], [1.0]
            if rule["buckets"]:
                return [nonzero(mix((bucket(values[0], rule["buckets"]) ^ int(rule["seed"], 16)) & MASK))], [1.0]
            key = int(rule["seed"], 16)
            if rule["is_cross"]:
                for value, seed in zip(values, rule["column_seeds"], strict=True):
                    key = combine(key, value_key(value, int(seed, 16), rule))
            else:
                key = value_key(values[0], key, rule)
            return [self.kept(rule, key)], [1.0]
        ids = row.get(rule["columns"][0]) or []
        weights = (row.get(rule["weights"]) or []) if rule["weights"] else [1.0] * len(ids)
        pairs = [
            (self.kept(rule, value_key(value, int(rule["seed"], 16), rule)), weight)
            for value, weight in zip(ids, weights, strict=True)
            if value is not None
        ]
        pairs = [pair for pair in pairs if pair[0]]
        pairs = pairs[: rule["max_length"]] if rule["truncate"] == "first" else pairs[-rule["max_length"] :]
        if not pairs and missing:
            pairs = [(missing, 1.0)]
        return [key for key, _ in pairs], [weight for _, weight in pairs]

    def kept(self, rule: dict[str, Any], key: int) -> int:
        if rule["vocabulary"] and key not in self.vocabularies[rule["name"]]:
            return int(rule["vocabulary"]["rare_key"], 16)
        return key

    def dense(self, row: dict[str, Any]) -> list[float]:
        result = []
        for rule in self.spec["inputs"]["dense"]:
            value = row.get(rule["column"]) if rule["column"] in row else rule["absent_column"]
            if value is None or math.isnan(value):
                value = rule["fill"]
            value = float(value)
            if rule["transform"] == "log1p":
                value = math.copysign(math.log1p(abs(value)), value)
            if rule["clip"]:
                value = max(rule["clip"][0], min(rule["clip"][1], value))
            if rule["mean"] is not None:
                value = (value - rule["mean"]) * rule["scale"]
            result.append(value)
        return result

    def table(self, name: str) -> dict[int, np.ndarray]:
        """Key -> the program's row."""
        about = self.spec["tables"][name]
        found = {}
        for path in sorted((self.directory / about["folder"]).glob("export-*.parquet")):
            for row in pq.read_table(path).to_pylist():
                vector = np.zeros(about["width"], np.float32)
                if row["embedding"] is not None:
                    vector = np.array(row["embedding"])
                    if about["dtype"] == "bfloat16":
                        vector = (vector.astype(np.uint32) << 16).view(np.float32)
                    elif about["dtype"] == "int8":
                        vector = vector.astype(np.float32) * np.float32(row["scale"])
                first = [row["first_order"]] if about["first_order"] else []
                found[row["key"]] = np.array([*first, *vector], np.float32)
        return found

    def arrays(self, rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
        """What the program takes for these rows."""
        inputs, features = self.spec["program"]["inputs"], {f["name"]: f for f in self.spec["inputs"]["features"]}
        read = {name: [self.keys(rule, row) for row in rows] for name, rule in features.items()}
        arrays: dict[str, np.ndarray] = {}
        for table, about in self.spec["tables"].items():
            mine = [name for name, rule in features.items() if rule["table"] == table]
            distinct = sorted({key for name in mine for keys, _ in read[name] for key in keys if key})
            place = {key: at + 1 for at, key in enumerate(distinct)} | {0: 0}
            vectors, lead = self.table(table), int(about["first_order"])
            unknown = np.load(self.directory / about["unknown"]) if about["unknown"] else None
            zeros = {k for name in about["zeros_if_unknown"] for keys, _ in read[name] for k in keys}
            values = np.zeros((len(distinct), lead + about["width"]), np.float32)
            for at, key in enumerate(distinct):
                if key in vectors:
                    values[at] = vectors[key]
                elif unknown is not None and key not in zeros:
                    values[at, lead:] = unknown[key % 65536]
            for one in (one for one in inputs if one["table"] == table):
                if one["kind"] == "rows":
                    arrays[one["name"]] = values
                elif one["kind"] == "single":
                    columns = [[place[keys[0]] for keys, _ in read[name]] for name in one["features"]]
                    arrays[one["name"]] = np.array(columns, np.int32).T.copy()
                else:
                    lists = read[one["features"][0]]
                    longest = max(1, *(len(keys) for keys, _ in lists))
                    kind = np.int32 if one["kind"] == "list" else np.float32
                    padded = np.zeros((len(rows), longest), kind)
                    for at, (keys, weights) in enumerate(lists):
                        padded[at, : len(keys)] = [place[k] for k in keys] if one["kind"] == "list" else weights
                    arrays[one["name"]] = padded
        for one in inputs:
            if one["kind"] == "dense":
                arrays[one["name"]] = np.array([self.dense(row) for row in rows], np.float32)
        return arrays
