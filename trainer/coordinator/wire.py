"""Typed messages as protobuf and back: fields are carried over by name, so there is nothing to keep in step by hand.

A class of `trainer.protocol.messages` and the protobuf message of the same name have the same fields. Beyond that:

- A union of classes is a `oneof` whose field's name is the tag of the class.
- A `Document` (and whatever else is plain data to the way, such as a job) is its JSON.
- A tuple of numbers with a name of its own, such as `Span`, is a message whose fields are its members in order.
- A tuple that may be None is a message with one repeated field.
"""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message as Proto
from pydantic import ValidationError
from pydantic_core import to_json

from paddlewheel.pserver.messages import Message, ServerSpec
from paddlewheel.trainer.protocol import messages
from paddlewheel.trainer.protocol.messages import MessageError, explain

AnyMessage = TypeVar("AnyMessage", bound=Message)

_TAGS = ("event", "what", "command", "order", "answer")
CLASSES: dict[str, type[Message]] = {
    found.__name__: found
    for found in (*vars(messages).values(), ServerSpec)
    if isinstance(found, type) and issubclass(found, Message) and found is not Message
}
"""By name, which is also that of the protobuf message."""


def tag_of(kind: type[Message]) -> tuple[str, str] | None:
    """The field that tells which one of a union a class is, and its value; None: it is in no union."""
    for name in _TAGS:
        field = kind.model_fields.get(name)
        if field is not None and isinstance(field.default, str) and get_args(field.annotation) == (field.default,):
            return name, field.default
    return None


@dataclass(frozen=True)
class _Field:
    """How one field of a class is carried: `kind` chooses, `descriptor` is of the message in it, if there is one."""

    name: str
    kind: str
    descriptor: Descriptor | None = None


@functools.cache
def _fields(descriptor: Descriptor) -> tuple[_Field, ...]:
    """The fields of a message as its class has them: a oneof is one field."""
    found: list[_Field] = []
    for field in descriptor.fields:
        oneof = field.containing_oneof
        if oneof is not None and len(oneof.fields) > 1:
            if oneof.fields[0] is field:
                found.append(_Field(oneof.name, "union", descriptor))
            continue
        inside = field.message_type
        if inside is None:
            kind = "many" if field.is_repeated else "optional" if field.has_presence else "one"
        elif inside.GetOptions().map_entry:
            inside = inside.fields_by_name["value"].message_type
            kind = "map" if inside is None else "map of messages"
        else:
            kind = "messages" if field.is_repeated else "message"
        found.append(_Field(field.name, kind, inside))
    return tuple(found)


def _shape(descriptor: Any) -> str:
    """What a message stands for: a class, a document, a tuple, a union, or a tuple that may be None."""
    if descriptor.name == "Document":
        return "document"
    if descriptor.name in CLASSES or descriptor.name == "TrainerSpec":
        return "class"
    fields = _fields(descriptor)
    if len(fields) == 1:
        return "union" if fields[0].kind == "union" else "optional tuple"
    return "tuple"


@functools.cache
def _names_of_tuple(descriptor: Any) -> tuple[str, ...] | None:
    """The fields of a message that stands for a tuple of several members; None: it stands for something else."""
    names = tuple(field.name for field in descriptor.fields)
    return names if _shape(descriptor) == "tuple" and len(names) > 1 else None


# ---------------------------------------------------------------------------------------------------------- to protobuf


def fill(target: Proto, message: Any, *, skip: tuple[str, ...] = ()) -> None:
    """Writes a message (of the class that `target` is named after) into its protobuf form.

    Args:
        target: an empty protobuf message.
        message: what has the fields of `target` as its attributes.
        skip: fields of `target` that it lacks.
    """
    for field in _fields(target.DESCRIPTOR):
        if field.name not in skip:
            _put(target, field, getattr(message, field.name))


def _put(target: Proto, field: _Field, value: Any) -> None:
    if value is None:
        return
    match field.kind:
        case "one" | "optional":
            setattr(target, field.name, value)
        case "many":
            getattr(target, field.name).extend(value)
        case "map":
            getattr(target, field.name).update(value)
        case "map of messages":
            place = getattr(target, field.name)
            for key, each in value.items():
                _fill_any(place[key], each)
        case "messages":
            place, names = getattr(target, field.name), _names_of_tuple(field.descriptor)
            for each in value:
                if names is not None:  # spans are many
                    place.add(**dict(zip(names, each, strict=True)))
                else:
                    _fill_any(place.add(), each)
        case "message":
            _fill_any(getattr(target, field.name), value)
        case "union":
            put_union(target, value)


def put_union(target: Proto, value: Message) -> None:
    """Writes one of a union into the oneof field that bears its tag."""
    tag = tag_of(type(value))
    assert tag is not None, f"{type(value).__name__} is in no union"
    _fill_any(getattr(target, tag[1]), value)


def _fill_any(target: Proto, value: Any) -> None:
    target.SetInParent()
    descriptor = target.DESCRIPTOR
    match _shape(descriptor):
        case "document":
            target.json = to_json(value, inf_nan_mode="null", fallback=str).decode()  # type: ignore[attr-defined]
        case "class":
            fill(target, value)
        case "union":
            put_union(target, value)
        case "optional tuple":
            getattr(target, descriptor.fields[0].name).extend(value)
        case _:
            for field, each in zip(descriptor.fields, value, strict=True):
                setattr(target, field.name, each)


# -------------------------------------------------------------------------------------------------------- from protobuf


def read(message: Proto, kind: type[AnyMessage]) -> AnyMessage:
    """The message as an object of its class. Raises MessageError, which names the field."""
    try:
        return kind.model_validate(plain(message))
    except ValidationError as error:
        raise MessageError(explain(kind.__name__, error)) from None


def read_union(message: Proto, oneof: str) -> Any:
    """What stands in a oneof, as an object of its class. Raises MessageError, also when nothing does."""
    which = message.WhichOneof(oneof)
    if which is None:
        raise MessageError(
            f"{message.DESCRIPTOR.name}.{oneof} is missing, or of a kind that this version does not know"
        )
    found = getattr(message, which)
    return read(found, CLASSES[found.DESCRIPTOR.name])


def plain(message: Proto) -> dict[str, Any]:
    """The message as plain data, for its class or as JSON. Raises MessageError when a document is none."""
    return {field.name: _get(message, field) for field in _fields(message.DESCRIPTOR)}


def _get(message: Proto, field: _Field) -> Any:
    match field.kind:
        case "one":
            return getattr(message, field.name)
        case "optional":
            return getattr(message, field.name) if message.HasField(field.name) else None
        case "many":
            return tuple(getattr(message, field.name))
        case "map":
            return dict(getattr(message, field.name))
        case "map of messages":
            return {key: _plain_any(each) for key, each in getattr(message, field.name).items()}
        case "messages":
            names = _names_of_tuple(field.descriptor)
            make = _plain_any if names is None else operator.attrgetter(*names)
            return tuple(map(make, getattr(message, field.name)))
        case "message":
            return _plain_any(getattr(message, field.name)) if message.HasField(field.name) else None
    which = message.WhichOneof(field.name)
    if which is None:
        raise MessageError(f"{message.DESCRIPTOR.name}.{field.name} is missing, or of a kind that is not known")
    found = getattr(message, which)
    tag = tag_of(CLASSES[found.DESCRIPTOR.name])
    assert tag is not None
    return {tag[0]: tag[1], **plain(found)}


def _plain_any(message: Any) -> Any:
    descriptor = message.DESCRIPTOR
    match _shape(descriptor):
        case "document":
            return _document(message.json)
        case "class":
            return plain(message)
        case "union":
            return _get(message, _fields(descriptor)[0])
        case "optional tuple":
            return tuple(getattr(message, descriptor.fields[0].name))
    return tuple(getattr(message, field.name) for field in descriptor.fields)


def _document(text: str) -> Any:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"a document is no JSON: {error}") from error
    if not isinstance(found, Mapping):
        raise MessageError("a document is no JSON object")
    return found


def fields_of(descriptor: Descriptor) -> tuple[str, ...]:
    """Names of the fields that the class of a protobuf message has (its tag aside), for the test that compares them."""
    return tuple(field.name for field in _fields(descriptor))
