"""Typed messages over protobuf: nothing is lost on the way, and nothing that is missing or unknown gets through."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddlewheel.pserver.messages import Message, ServerSpec
from paddlewheel.pserver.saved_tables import Part
from paddlewheel.trainer.coordinator import coordinator_pb2 as pb
from paddlewheel.trainer.coordinator import wire
from paddlewheel.trainer.coordinator.specs import TrainerSpec
from paddlewheel.trainer.protocol import messages
from paddlewheel.trainer.protocol.messages import MessageError, read_command, read_event, to_line
from tests.support.plans import job, progress, trainer_spec

WORDS = st.text(max_size=5)
NUMBERS = st.integers(-(2**63), 2**63 - 1)
MEASURES = st.floats(allow_nan=False, allow_infinity=False)
DOCUMENTS = st.dictionaries(WORDS, st.none() | st.booleans() | NUMBERS | MEASURES | WORDS, max_size=3)
PLAIN = {int: NUMBERS, float: MEASURES, str: WORDS, bool: st.booleans(), type(None): st.none()}


def of(kind: type[Message]) -> st.SearchStrategy[Message]:
    """Any message of a class."""
    fields = {}
    for name, field in kind.model_fields.items():
        tag = wire.tag_of(kind)
        if tag is None or name != tag[0]:
            fields[name] = _of_type(field.annotation)
    return st.builds(kind, **fields)


def _of_type(annotation: Any) -> st.SearchStrategy[Any]:
    origin, inside = getattr(annotation, "__origin__", None), getattr(annotation, "__args__", ())
    if isinstance(annotation, type) and origin is None and issubclass(annotation, Message):
        return of(annotation)
    if hasattr(annotation, "__metadata__"):
        return _of_type(origin)
    if annotation == messages.Document:
        return DOCUMENTS
    if origin is dict:
        return st.dictionaries(WORDS, _of_type(inside[1]), max_size=2)
    if origin is tuple and len(inside) == 2 and inside[1] is Ellipsis:
        return st.lists(_of_type(inside[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*map(_of_type, inside))
    if inside and (origin is None or "Union" in str(origin)):
        return st.one_of([_of_type(each) for each in inside])
    return PLAIN[annotation] if annotation in PLAIN else st.from_type(annotation)


EVENTS = messages.WorkerEvent.__args__
COMMANDS = messages.WorkerCommand.__args__


@given(st.one_of([of(kind) for kind in EVENTS]))
def test_an_event_comes_out_of_pipe_and_protobuf_as_it_went_in(event: Any) -> None:
    assert read_event(to_line(event)) == event
    target = pb.WorkerEvent()
    wire.put_union(target, event)
    arrived = pb.WorkerEvent.FromString(target.SerializeToString())
    assert wire.read_union(arrived, "event") == event


@given(st.one_of([of(kind) for kind in COMMANDS]))
def test_a_command_comes_out_of_protobuf_and_pipe_as_it_went_in(command: Any) -> None:
    target = pb.WorkerInput()
    wire.put_union(target, command)
    assert read_command(to_line(wire.read_union(target, "command"))) == command


def test_every_class_has_the_fields_of_its_protobuf_message() -> None:
    """By name and in order: whoever adds a field to one of the two learns here that the other lacks it."""
    kinds = {**wire.CLASSES, "TrainerSpec": TrainerSpec}
    for name, kind in kinds.items():
        tag = wire.tag_of(kind)
        fields = [field for field in kind.model_fields if tag is None or field != tag[0]]
        assert list(wire.fields_of(pb.DESCRIPTOR.message_types_by_name[name])) == fields, name


def test_a_part_of_a_saved_table_is_carried_whole() -> None:
    assert tuple(messages.UploadedPart.model_fields) == Part._fields


def test_every_kind_of_event_has_a_place_in_its_oneof() -> None:
    places = {
        ("WorkerEvent", "event"): EVENTS,
        ("WorkerInput", "command"): COMMANDS,
        ("Request", "ask"): messages.TrainerRequest.__args__,
        ("Reply", "answer"): messages.TrainerReply.__args__,
        ("HostRequest", "order"): messages.HostOrder.__args__,
        ("HostResponse", "answer"): messages.HostAnswer.__args__,
    }
    for (message, oneof), kinds in places.items():
        fields = pb.DESCRIPTOR.message_types_by_name[message].oneofs_by_name[oneof].fields
        told = {field.name: field.message_type.name for field in fields}
        assert told == {wire.tag_of(kind)[1]: kind.__name__ for kind in kinds}, message


def test_specifications_arrive_whole() -> None:
    server = ServerSpec(tables=job().tables, endpoints=("h:1", "h:2"), rank=1, num_trainers=3, seed=7, attempt=2)
    target = pb.StartWorker()
    wire.fill(target.server, server)
    assert wire.read(target.server, ServerSpec) == server
    assert ServerSpec.model_validate_json(json.dumps(wire.plain(target.server))) == server
    for changes in ({}, {"days": ("a", "b"), "restore": "s3://b/x", "server_uids": ("u",)}, {"days": ()}):
        staging = messages.StagingPlan(folders=("/a",), owner="o") if changes else None
        trainer = trainer_spec(job(num_trainers=2), 1, 2, staging=staging, **changes)
        target = pb.StartWorker()
        wire.fill(target.trainer, trainer)
        assert TrainerSpec.model_validate_json(json.dumps(wire.plain(target.trainer))) == trainer


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (pb.WorkerEvent(), "WorkerEvent.event is missing"),
        (pb.WorkerEvent(request=pb.Request(id=1)), "Request.ask is missing"),
        (pb.WorkerEvent(result=pb.Result()), "figures"),
        (pb.WorkerEvent(error=pb.WorkerError(kind="tired", message="m")), "kind"),
        (pb.WorkerEvent(validation=pb.Validation(report=pb.Document(json="[1]"))), "no JSON object"),
    ],
)
def test_what_is_missing_or_unknown_is_refused_by_name(message: pb.WorkerEvent, words: str) -> None:
    with pytest.raises(MessageError, match=words):
        wire.read_union(message, "event")


def test_figures_that_are_not_finite_are_none() -> None:
    """JSON has no word for them, and nobody can draw them."""
    told = progress(loss=math.nan, auc=math.inf, rows_per_second=1.0)
    assert (told.loss, told.auc, told.rows_per_second) == (None, None, 1.0)
    result = messages.Result(figures={"loss": math.nan, "deep": [{"auc": math.inf}]})
    assert read_event(to_line(result)).figures == {"loss": None, "deep": [{"auc": None}]}
    target = pb.WorkerEvent()
    wire.put_union(target, result)
    assert wire.read_union(target, "event").figures == {"loss": None, "deep": [{"auc": None}]}
