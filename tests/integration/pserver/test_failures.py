"""What is lost is noticed: in seconds, as an exception, and never as values."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from paddlewheel.pserver import admin
from paddlewheel.pserver.client import Client
from paddlewheel.pserver.config import TableConfig
from paddlewheel.pserver.errors import PullError, PushError, SaveError, ServerError
from paddlewheel.pserver.local import local_servers

pytestmark = pytest.mark.processes

TABLES = {"t": TableConfig(width=4, shards=4)}
KEYS = np.arange(1, 1001, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
ONES = np.ones(len(KEYS), np.float32)


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """For tests that leave them running."""
    with local_servers(TABLES, 2, tmp_path_factory.mktemp("servers")) as servers:
        yield servers


@pytest.fixture
def own_servers(tmp_path):
    with local_servers(TABLES, 2, tmp_path) as servers:
        yield servers


def test_a_killed_server_fails_the_next_pull_and_push_at_once(own_servers):
    with Client(TABLES, own_servers.endpoints) as client:
        values = client.pull("t", KEYS)
        own_servers.processes[1].kill()
        own_servers.processes[1].wait()
        started = time.monotonic()
        with pytest.raises(PullError, match=own_servers.endpoints[1]):
            client.pull("t", KEYS)
        with pytest.raises(PushError, match=own_servers.endpoints[1]):
            client.push("t", KEYS, values, ONES, ONES)
        assert time.monotonic() - started < 2
        client.flush()  # nothing under way hangs it


@contextlib.contextmanager
def started_again(servers):
    """Kills the only server and starts another process under its address."""
    servers.processes[0].kill()
    servers.processes[0].wait()
    spec = {"tables": {"t": TABLES["t"].model_dump()}, "endpoints": servers.endpoints, "rank": 0}
    again = subprocess.Popen(
        [sys.executable, "-m", "paddlewheel.pserver.server_process"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    try:
        again.stdin.write(json.dumps(spec).encode() + b"\n")
        again.stdin.close()
        deadline = time.monotonic() + 60
        while not admin.is_healthy(*address(servers.endpoints[0])):
            assert again.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield
    finally:
        again.terminate()
        again.wait(10)


def test_a_server_that_was_restarted_is_not_taken_for_the_old_one(tmp_path):
    """Its tables would be empty, and all its keys would look new."""
    with local_servers(TABLES, 1, tmp_path) as servers, Client(TABLES, servers.endpoints) as client:
        client.push("t", KEYS, client.pull("t", KEYS), ONES, ONES)
        with started_again(servers):
            for _ in range(3):
                with pytest.raises(PullError):
                    client.pull("t", KEYS)
            with pytest.raises(PullError, match="lost its tables"):
                client.pull("t", KEYS)


def test_a_trainer_of_an_earlier_attempt_changes_nothing_in_a_later_one(tmp_path):
    """One that pushes all the while, and one that had not spoken to the server yet; under a fixed port."""
    grads = np.ones((len(KEYS), 5), np.float32)
    with local_servers(TABLES, 1, tmp_path) as servers, contextlib.ExitStack() as stack:
        before = [admin.server_uid(*address(servers.endpoints[0]))]
        stale, late = (stack.enter_context(Client(TABLES, servers.endpoints, server_uids=before)) for _ in range(2))
        stop, applied = threading.Event(), []

        def push_on():
            while not stop.is_set():
                with contextlib.suppress(PushError):
                    stale.push("t", KEYS, grads, ONES, ONES)
                    applied.append(time.monotonic())

        pushing = threading.Thread(target=push_on)
        pushing.start()
        while not applied:
            time.sleep(0.01)
        try:
            with started_again(servers):
                serving = time.monotonic()
                with pytest.raises(PushError, match="not the process that it was"):
                    late.push("t", KEYS, grads, ONES, ONES)
                time.sleep(0.5)  # for the other one to try again and again
                with Client(TABLES, servers.endpoints) as new:
                    assert new.num_keys() == {"t": (0,)}
                    new.push("t", KEYS, grads, ONES, ONES)
                    shows = new.pull_with_counts("t", KEYS).shows_U
                    np.testing.assert_array_equal(shows, ONES)
                assert max(applied) < serving
        finally:
            stop.set()
            pushing.join()


def test_a_stopped_server_fails_within_the_time_limit_and_works_again_afterwards(servers):
    with Client(TABLES, servers.endpoints, pull_timeout_seconds=0.5) as client:
        before = client.pull("t", KEYS)
        os.kill(servers.processes[0].pid, signal.SIGSTOP)
        try:
            wait_for_state(servers.processes[0].pid, "T")
            started = time.monotonic()
            with pytest.raises(PullError, match="timed out"):
                client.pull("t", KEYS)
            assert 0.4 < time.monotonic() - started < 3
            assert not admin.is_healthy(*address(servers.endpoints[0]), timeout_seconds=0.2)
        finally:
            os.kill(servers.processes[0].pid, signal.SIGCONT)
        np.testing.assert_array_equal(client.pull("t", KEYS), before)  # the late answer is not mistaken for this one's


def test_gradients_that_are_not_finite_never_reach_a_server(servers):
    with Client(TABLES, servers.endpoints) as client:
        before = client.pull_with_counts("t", KEYS)
        start = before.values_UW
        for bad in (np.nan, np.inf):
            grads = np.zeros_like(start)
            grads[7, 2] = bad
            with pytest.raises(PushError, match="NaN or inf"):
                client.push("t", KEYS, grads, ONES, ONES)
        np.testing.assert_array_equal(client.pull_with_counts("t", KEYS).shows_U, before.shows_U)


def test_key_0_and_wrong_shapes_are_refused(servers):
    with Client(TABLES, servers.endpoints) as client:
        with pytest.raises(AssertionError, match="padding"):
            client.pull("t", np.array([5, 0], np.uint64))
        with pytest.raises(AssertionError):
            client.pull("t", np.array([5], np.int64))
        with pytest.raises(AssertionError):
            client.push("t", KEYS, np.zeros((len(KEYS), 4), np.float32), ONES, ONES)
        with pytest.raises(AssertionError, match="shows"):
            client.push("t", KEYS, np.zeros((len(KEYS), 5), np.float32), ONES * 0, ONES)


def test_no_keys_is_fine(servers):
    none = np.zeros(0, np.uint64)
    with Client(TABLES, servers.endpoints) as client:
        values = client.pull("t", none)
        assert values.shape == (0, 5)
        client.push("t", none, values, none.astype(np.float32), none.astype(np.float32))


def test_a_table_of_another_width_or_name_on_the_server_is_noticed(servers):
    with Client({"t": TableConfig(width=8)}, servers.endpoints) as client, pytest.raises(PullError, match="width"):
        client.pull("t", KEYS)
    with Client({"u": TableConfig(width=4)}, servers.endpoints) as client, pytest.raises(PullError, match="table"):
        client.pull("u", KEYS)


def test_a_full_disk_is_noticed_before_it_ends_a_server(servers, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10_000))
    with Client(TABLES, servers.endpoints) as client:
        client.push("t", KEYS, client.pull("t", KEYS), ONES, ONES)
        with pytest.raises(SaveError, match=r"1000 keys needs about 0\.\d MB, but .* has 0\.0 MB left"):
            client.save(tmp_path / "saved")
        assert sum(client.num_keys()["t"]) == 1000
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
        client.save(tmp_path / "saved")


def test_a_closed_client_says_so(servers):
    client = Client(TABLES, servers.endpoints)
    client.pull("t", KEYS)
    client.close()
    client.close()
    with pytest.raises(PullError, match="closed"):
        client.pull("t", KEYS)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, "stop"])
def test_servers_end_in_order(own_servers, how):
    with Client(TABLES, own_servers.endpoints) as client:
        client.push("t", KEYS, client.pull("t", KEYS), ONES, ONES)
        if how == "stop":
            client.stop_servers()
        else:
            for process in own_servers.processes:
                os.killpg(process.pid, how)  # as Ctrl-C does: the helper gets it too
        assert [process.wait(10) for process in own_servers.processes] == [0, 0]
        client.stop_servers()  # they are gone: fine
    assert not any(admin.is_healthy(*address(endpoint)) for endpoint in own_servers.endpoints)


def test_a_taken_port_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        spec = f'{{"tables": {{"t": {{}}}}, "endpoints": ["{endpoint}"], "rank": 0}}\n'
        done = subprocess.run(
            [sys.executable, "-m", "paddlewheel.pserver.server_process"],
            input=spec,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 75
    assert f"cannot listen on {endpoint}" in done.stdout
    assert '"kind":"port"' in done.stdout


@pytest.mark.parametrize(
    "spec", ["", "{}", '{"tables": {"t": {"widht": 3}}, "endpoints": ["127.0.0.1:1"], "rank": 0}', "[1]"]
)
def test_a_wrong_spec_is_the_jobs_fault(spec):
    done = subprocess.run(
        [sys.executable, "-m", "paddlewheel.pserver.server_process"],
        input=spec + "\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 64
    assert '"kind":"job"' in done.stdout


def test_servers_end_when_their_starter_dies(tmp_path):
    code = (
        "import sys, time, pathlib\n"
        "from paddlewheel.pserver.config import TableConfig\n"
        "from paddlewheel.pserver.local import local_servers\n"
        "with local_servers({'t': TableConfig()}, 1, pathlib.Path(sys.argv[1])) as servers:\n"
        "    print(servers.endpoints[0], servers.processes[0].pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    endpoint, pid = starter.stdout.readline().split()
    starter.kill()
    starter.communicate()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists()
    assert not admin.is_healthy(*address(endpoint))


def test_something_else_on_the_port_is_not_healthy():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        endpoint = f"127.0.0.1:{other.getsockname()[1]}"
        assert not admin.is_healthy(*address(endpoint), timeout_seconds=0.2)
        with pytest.raises(ServerError):
            admin.brpc_metrics(*address(endpoint), timeout_seconds=0.2)


def test_who_answers_in_another_language_is_not_healthy():
    """As gRPC does, to which the kernel gives the port of a server that is gone."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        endpoint = f"127.0.0.1:{other.getsockname()[1]}"

        def answer():
            for _ in range(2):
                connection, _ = other.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"\0\0\x12\x04\0\0\0\0\0\n")

        with ThreadPoolExecutor(1) as pool:
            answering = pool.submit(answer)
            assert not admin.is_healthy(*address(endpoint))
            with pytest.raises(ServerError, match="gives no page"):
                admin.server_uid(*address(endpoint))
            answering.result()


def test_metrics_of_a_server(servers):
    metrics = admin.brpc_metrics(*address(servers.endpoints[0]))
    assert metrics["process_memory_resident"] > 10_000_000


def wait_for_state(pid, state):
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != state:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def address(endpoint):
    host, port = endpoint.rsplit(":", 1)
    return host, int(port)


def test_a_servers_identity_is_the_same_from_its_first_healthy_moment(tmp_path):
    """It answers a little before it knows when it was started; a client must not take it for another one then."""
    tables = {"t": TableConfig(width=2, shards=6)}
    for _ in range(3):
        with local_servers(tables, 1, tmp_path) as servers:
            port = int(servers.endpoints[0].rsplit(":", 1)[1])
            first = admin.server_uid("127.0.0.1", port)
            deadline = time.monotonic() + 0.3
            while time.monotonic() < deadline:
                assert admin.server_uid("127.0.0.1", port) == first
            assert first.split()[0] == str(servers.processes[0].pid)
