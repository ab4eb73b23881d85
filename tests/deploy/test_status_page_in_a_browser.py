"""The status page in headless Chromium: what a person sees, with hostile texts, and when the coordinator is gone."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from paddlewheel.trainer.coordinator import coordinator_pb2 as pb
from paddlewheel.trainer.coordinator import wire
from paddlewheel.trainer.coordinator.page import StatusPage
from paddlewheel.trainer.protocol.messages import TableFigures
from paddlewheel.trainer.telemetry import WebSecurity, WebServer
from tests.support.chromium import dump_dom, screenshot
from tests.support.plans import progress

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]
PICTURES = os.environ.get("PADDLEWHEEL_TEST_PICTURES")
HOSTILE = '<img src=x onerror="document.title=1">&amp;'


def job_status(**fields: Any) -> pb.JobStatus:
    figures: dict[str, Any] = {
        "epoch": 1,
        "epochs": 3,
        "step": 48_210,
        "rows": 98_734_080,
        "total_rows": 137_520_951,
        "loss": 0.44871,
        "auc": 0.80123,
        "rows_per_second": 61_250.0,
        "seconds_left": 633.0,
        "bad_steps": 0,
        "phase_seconds": {"wait": 120.0, "compute": 610.0, "allreduce": 190.0, "apply": 60.0, "push": 12.0},
    }
    table = {"keys": (700, 600), "bytes": 1 << 20, "new": 40, "evicted": 7, "admitted": None, "shard_skew": None}
    told = pb.Progress()
    wire.fill(told, progress(**figures, tables={"default": TableFigures(**table)}))
    members = [
        pb.MemberStatus(
            role=role,
            rank=rank,
            host=f"10.1.0.{10 * role + rank}",
            port=7000 + rank,
            state="ready",
            heartbeat_age_seconds=0.2 + 0.1 * rank,
            worker_memory_bytes=(21 if role == pb.ROLE_PSERVER else 3) << 30,
        )
        for role in (pb.ROLE_PSERVER, pb.ROLE_TRAINER)
        for rank in range(4)
    ]
    members[0].worker_memory_bytes, members[0].seconds_to_limit = 1 << 30, 300.0
    texts = [
        ("info", "attempt 1 begins: 4 servers, 4 trainers"),
        ("info", "all 4 trainers are ready"),
        ("info", "checkpoint of step 20000 committed in 41 s"),
        ("error", "trainer 2 was killed by SIGKILL"),
        ("warning", "starting again from step 20000 (restart 1 of 5)"),
        ("info", "attempt 2 begins: 4 servers, 4 trainers"),
        ("info", "checkpoint of step 40000 committed in 43 s"),
    ]
    base = {
        "name": "criteo-deepfm",
        "mode": "train",
        "phase": "running",
        "attempt": 2,
        "num_restarts": 1,
        "elapsed_seconds": 1740.0,
        "progress": told,
        "members": members,
        "entries": [
            pb.LogEntry(number=i, time_seconds=1.78e9 + 200 * i, level=level, text=text)
            for i, (level, text) in enumerate(texts, 1)
        ],
        "checkpoint": pb.CheckpointStatus(
            step=40_000, path="/checkpoints/criteo/step-40000", age_seconds=134, last_seconds=43, num_committed=2
        ),
    }
    return pb.JobStatus(**{**base, **fields})


FACTS = {
    "version": "0.1.0",
    "tables": {"default": {"width": 16, "optimizer": {"rule": "adagrad"}}, "item": {"width": 32}},
}


@pytest.fixture
def now() -> dict[str, pb.JobStatus]:
    return {"status": job_status()}


@pytest.fixture
def server(now: dict[str, pb.JobStatus]) -> Iterator[WebServer]:
    page = StatusPage("criteo-deepfm", lambda: now["status"], facts=FACTS)
    for i in range(1, 400):
        at = 4.0 * i
        auc = 0.802 - 0.12 * math.exp(-at / 300) + 0.001 * math.sin(i)
        loss = 0.449 + 0.2 * math.exp(-at / 200) + 0.004 * math.sin(2.3 * i)
        rate = 61_000 + 2500 * math.sin(i / 7) - (30_000 if 800 < at < 860 else 0)
        rows = 61_000 * (at if at < 800 else at - 200)
        page.curves.add(at, progress(rows=int(rows), loss=loss, auc=auc, rows_per_second=rate))
    with WebServer("127.0.0.1:0", page.routes(), WebSecurity()) as web:
        yield web


def url(server: WebServer) -> str:
    return f"http://127.0.0.1:{server.port}/"


def text_of(dom: str, identity: str) -> str:
    match = re.search(rf'id="{identity}"[^>]*>(.*?)</(?:p|span|h1|strong|pre|section|tbody|ol|div)>', dom, re.DOTALL)
    assert match, identity
    return unescape(re.sub(r"<[^>]+>", " ", match.group(1))).strip()


def number(text: str) -> float:
    return float(text.rstrip("kM")) * {"k": 1e3, "M": 1e6}.get(text[-1], 1.0)


def test_what_a_person_sees(server: WebServer, tmp_path: Path) -> None:
    dom = dump_dom(url(server))
    assert "<title>criteo-deepfm: running</title>" in dom
    assert text_of(dom, "name") == "criteo-deepfm"
    assert "98,734,080 of 137,520,951 rows (71.8 %), epoch 2 of 3, step 48,210, 10 min left" in dom
    members = text_of(dom, "members")
    for role in ("pserver 3", "trainer 0", "10.1.0.13:7003", "21.00 GiB"):
        assert role in members
    assert dom.count('class="curve"') == 6, "three curves, each broken where the job started again"
    for chart in re.findall(r"<svg.*?</svg>", dom, re.DOTALL)[:3]:
        ticks = [number(text) for text in re.findall(r'<text x="[1-6]?\d" [^>]*end"[^>]*>([^<]*)</text>', chart)]
        steps = [b - a for a, b in itertools.pairwise(ticks)]
        assert steps
        assert steps == pytest.approx([steps[0]] * len(steps))
        assert float(f"{steps[0]:.3e}"[:4]) in {1.0, 2.0, 2.5, 5.0}
    assert "trainer 2 was killed by SIGKILL" in text_of(dom, "entries")
    assert "step 40,000, 2 min ago, took 43 s; 2 committed, 0 failed. /checkpoints/criteo/step-40000" in dom
    assert "compute 61 %" in dom
    shown = " ".join(text_of(dom, "tables").split())
    assert shown == "default 16 adagrad 1,300 1 MiB 40 7 item 32 – – – – –"
    assert "1.00 GiB, full in 5 min" in members
    for name, size in {"wide": (1280, 1220), "narrow": (480, 1900)}.items():
        picture = screenshot(url(server), tmp_path / f"{name}.png", width=size[0], height=size[1])
        if PICTURES:
            Path(PICTURES, f"status-page-{name}.png").write_bytes(picture.read_bytes())


def test_a_failed_job_names_its_cause(server: WebServer, now: dict[str, pb.JobStatus]) -> None:
    outcome = pb.Outcome(
        exit_code=64, cause="trainer 1 failed: no such column", failed_role="trainer 1", detail="Trace\nback"
    )
    now["status"] = job_status(phase="over", over=True, outcome=outcome)
    dom = dump_dom(url(server))
    assert text_of(dom, "phase") == "over: code 64"
    assert text_of(dom, "cause") == "trainer 1 failed: no such column"
    assert "Trace\nback" in text_of(dom, "detail")
    assert not re.search(r'id="outcome"[^>]*hidden', dom)


def test_texts_from_a_job_are_never_markup(server: WebServer, now: dict[str, pb.JobStatus]) -> None:
    entries = [pb.LogEntry(number=1, time_seconds=1.0, level="error", text=HOSTILE)]
    member = pb.MemberStatus(role=pb.ROLE_TRAINER, rank=0, host=HOSTILE, state=HOSTILE)
    now["status"] = job_status(name=HOSTILE, entries=entries, members=[member], phase=HOSTILE)
    dom = dump_dom(url(server))
    assert "<img" not in dom
    assert text_of(dom, "name") == HOSTILE


def test_before_the_first_progress(server: WebServer, now: dict[str, pb.JobStatus]) -> None:
    now["status"] = pb.JobStatus(
        name="new", phase="rendezvous", members=[pb.MemberStatus(role=pb.ROLE_TRAINER, state="absent")]
    )
    dom = dump_dom(url(server))
    assert text_of(dom, "progress") == "no progress yet"
    assert "absent" in text_of(dom, "members")


def test_a_coordinator_that_is_gone_is_said_to_be(server: WebServer, now: dict[str, pb.JobStatus]) -> None:
    del now["status"]  # every request for the status fails
    dom = dump_dom(url(server))
    assert text_of(dom, "stale") == "the coordinator does not answer"
    assert 'class="stale"' in dom
