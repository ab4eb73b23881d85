"""What a model knows of its inputs beyond its job: the kind of each id column, and which fit its numbers are from.

A value's key depends on its kind (17 and "17" have two keys), and a number on the means it is standardised with, so
neither may change under a trained model. Checkpoints and exports keep the signature of the data they were trained on;
`InputSignature.check` holds other data against it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from paddlewheel.data_pipeline.errors import DataError

if TYPE_CHECKING:
    from paddlewheel.data_pipeline.config import DataConfig
    from paddlewheel.data_pipeline.statistics import Fitted

_CONVERTIBLE = ("integer", "string")


class _Described(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ColumnKind(_Described):
    """A raw column of a feature, as training has seen it."""

    feature: str
    """The feature."""

    column: str
    """The column; a cross has several."""

    kind: str
    """Equal values of one kind get one key: `integer` (also booleans and decimals), `string`, `date`, `time`,
    `timestamp`, `uuid`. What the feature's `type` declares, or else what the files hold."""

    type: str
    """The column's type in `file`; empty where only the declared type is known."""

    file: str
    """A file that holds it."""

    @property
    def said(self) -> str:
        """'int64 (key kind integer) in data/a.parquet'."""
        return f"{self.type} (key kind {self.kind}) in {self.file}" if self.type else f"declared as {self.kind}"

    def difference(self, known: ColumnKind, relation: str) -> str:
        """Why values of this column do not meet the keys of the known one; relation: 'with which ... was trained'."""
        remedy = f"Write {self.column!r} as it was"
        if known.kind in _CONVERTIBLE and self.kind in _CONVERTIBLE:
            remedy = f"Declare the feature's `type: {known.kind}`, or write the column as it was"
        return (
            f"column {self.column!r} of feature {self.feature!r} is {self.said}, and was {known.said}, {relation}: the "
            f"same value would get another key. {remedy}"
        )


class InputSignature(_Described):
    """Kinds of columns, and a hash of everything that was fitted."""

    kinds: tuple[ColumnKind, ...] = ()
    """Columns whose values are hashed; those that were null in all files are left out."""

    fitted: dict[str, str] = {}
    """xxh3-128 of what was fitted, by its use: `dense <column>` (mean, deviation), `quantiles <feature>`, `vocabulary
    <feature>`."""

    fitted_from: str = ""
    """The data of the fit, for people."""

    @classmethod
    def from_json(cls, content: Any) -> InputSignature:
        """Raises ValueError for what is no signature."""
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            raise ValueError(f"the signature of its inputs cannot be read: {error}") from error

    @classmethod
    def joined(cls, parts: Iterable[InputSignature]) -> InputSignature:
        """The kinds that any part knows, the first that does; the fit of the last part that has one."""
        kinds: dict[tuple[str, str], ColumnKind] = {}
        fitted: Mapping[str, str] = {}
        fitted_from = ""
        for part in parts:
            for kind in part.kinds:
                kinds.setdefault((kind.feature, kind.column), kind)
            if part.fitted:
                fitted, fitted_from = part.fitted, part.fitted_from
        return cls(kinds=tuple(kinds.values()), fitted=dict(fitted), fitted_from=fitted_from)

    def with_fit(self, fitted: Fitted | None, config: DataConfig) -> InputSignature:
        """The same with what a job takes from a fit."""
        if fitted is None or not (hashes := fitted.hashes(config)):
            return self
        return self.model_copy(update={"fitted": hashes, "fitted_from": fitted.made_from})

    def check(self, known: InputSignature, relation: str, *, refitted: bool = False) -> None:
        """Refuses data that a model would take for something else than what it was trained on.

        Args:
            known: what the model was trained on.
            relation: what it is to the known data, such as 'with which <checkpoint> was trained'.
            refitted: another fit is wanted.

        Raises:
            DataError: a column is of another kind, or the fit is another one; names both sides and the remedy.
        """
        theirs = {(kind.feature, kind.column): kind for kind in known.kinds}
        for kind in self.kinds:
            other = theirs.get((kind.feature, kind.column))
            if other is not None and other.kind != kind.kind:
                raise DataError(kind.difference(other, relation))
        if not refitted:
            self.check_fit(known, relation, self.fitted)

    def check_fit(self, known: InputSignature, relation: str, names: Iterable[str]) -> None:
        """The same for these parts of the fit alone."""
        changed = [name for name in names if known.fitted.get(name, self.fitted[name]) != self.fitted[name]]
        if changed:
            here, there = self.fitted[changed[0]][:8], known.fitted[changed[0]][:8]
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            raise DataError(
                f"data.statistics: {', '.join(changed[:3])}{more} was fitted otherwise: from {self.fitted_from} (hash "
                f"{here}) here, and from {known.fitted_from} (hash {there}) in the fit {relation}. Put that fit back "
                "(`paddlewheel data fit` on the same data makes it again), train anew (--from-scratch), or go on with "
                "the new one (train --resume)"
            )

    @property
    def identity(self) -> str:
        """What must be equal on all trainers; file names may differ."""
        kinds = sorted((kind.feature, kind.column, kind.kind) for kind in self.kinds)
        return f"{kinds} {sorted(self.fitted.items())}"
