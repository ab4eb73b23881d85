"""What all tests share: no test leaves a process, a port or a temporary file; waiting is for an event, with a deadline.

Every process that a test starts inherits this run's id in its environment, so leftovers are found even when their
parent is gone; temporary files go to a folder of this run's own. Where several workers run the tests (pytest-xdist),
each is a run of its own in this sense: what a test in another worker has just started is no leftover.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest

from tests.support import needs

_RUN_VARIABLE = "PADDLEWHEEL_TEST_RUN"
_CHECKED_FOLDERS = ("integration", "chaos")
# Outside the folders of whole processes, the files that take more than a minute of processor time
_LONG_FILES = ("unit/trainer/models/test_models.py", "unit/trainer/kernels/gpu/test_gpu_kernels.py")
_MOST_WORKERS = 8  # a whole job takes about 2 GB
_STOP_SECONDS = 10.0

hypothesis.settings.register_profile("default", deadline=None, print_blob=True)
hypothesis.settings.register_profile("ci", parent=hypothesis.settings.get_profile("default"), derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_configure(config: pytest.Config) -> None:
    """Marks this run and gives it a temporary folder; `tmp_path` stays where pytest puts it.

    Workers inherit both from the process that starts them: their ids begin with its id, their folders lie in its own.
    """
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    if (worker := getattr(config, "workerinput", None)) is None:
        os.environ[_RUN_VARIABLE] = uuid.uuid4().hex
    else:
        os.environ[_RUN_VARIABLE] += f"-{worker['workerid']}"
    folder = tempfile.mkdtemp(prefix="paddlewheel-tests-")
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of whole processes are checked for what they leave behind, and come first; then the long files.

    A file runs in one worker (`--dist loadfile`), so no more jobs run at once than there are workers; the files that
    take seconds are what fills the workers up in the end. A long file that began last would keep one worker busy
    while the others have nothing left to do.
    """
    root = Path(__file__).parent

    def folder(item: pytest.Item) -> str:
        return item.path.relative_to(root).parts[0] if item.path.is_relative_to(root) else ""

    for item in items:
        if folder(item) in _CHECKED_FOLDERS:
            item.add_marker(pytest.mark.processes)
    long_files = {root / file for file in _LONG_FILES}
    items.sort(key=lambda item: (folder(item) not in (*_CHECKED_FOLDERS, "deploy"), item.path not in long_files))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: the processors that this process may use, as the container's limit has it."""
    processors = len(os.sched_getaffinity(0))
    limit = Path("/sys/fs/cgroup/cpu.max")
    if limit.exists():
        quota, period = limit.read_text().split()
        processors = processors if quota == "max" else min(processors, int(quota) // int(period))
    return max(1, min(processors, _MOST_WORKERS))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leaves out a test before its fixtures are made, if what it needs is not here."""
    needs.require_marked(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keeps what a skipped test needs for the table at the end."""
    report = yield
    needs.note(report, call.excinfo.value if call.excinfo else None)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was left out, and what brings it."""
    if lines := needs.table(terminalreporter.stats.get("skipped", [])):
        terminalreporter.section("left out")
        for line in lines:
            terminalreporter.line(line)


def _processes_of_this_run(*, of_workers: bool = False) -> set[psutil.Process]:
    """What this process's tests have started; of_workers: what those of its workers have."""
    found = set()
    run = os.environ[_RUN_VARIABLE]
    for process in psutil.process_iter():
        try:
            marked = process.environ().get(_RUN_VARIABLE, "")
            if marked.startswith(f"{run}-") if of_workers else marked == run and process.pid != os.getpid():
                found.add(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return {process for process in found if process.is_running() and process.status() != psutil.STATUS_ZOMBIE}


def _own_listening_ports() -> set[int]:
    connections = psutil.Process().net_connections(kind="inet")
    return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}


def _describe(process: psutil.Process) -> str:
    try:
        return f"process {process.pid}: {' '.join(process.cmdline())[:200]}"
    except psutil.NoSuchProcess:
        return f"process {process.pid} (just ended)"


@pytest.fixture(autouse=True)
def leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test marked `processes` that leaves processes, listening ports or temporary files; ends what was left."""
    if request.node.get_closest_marker("processes") is None:
        yield
        return
    temporary = Path(tempfile.gettempdir())
    processes, ports, files = _processes_of_this_run(), _own_listening_ports(), set(temporary.iterdir())
    yield
    deadline = time.monotonic() + _STOP_SECONDS
    while _processes_of_this_run() - processes and time.monotonic() < deadline:
        time.sleep(0.05)
    left = _processes_of_this_run() - processes
    findings = [_describe(process) for process in left]
    findings += [f"port {port} is still listened on" for port in _own_listening_ports() - ports]
    findings += [f"temporary file {file}" for file in set(temporary.iterdir()) - files]
    for process in left:
        process.kill()
    if findings:
        pytest.fail("left behind by the test:\n" + "\n".join(sorted(findings)), pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def _processes_can_be_interrupted() -> None:
    """Under `nohup`, or in the background of a shell, the signals of a terminal are ignored, and a child inherits that.

    A handler is not inherited: this process goes on ignoring them, and what a test starts does as it always would.
    """
    for number in (signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


@pytest.fixture(scope="session", autouse=True)
def _no_process_outlives_the_run() -> Iterator[None]:
    """The same for what fixtures of a module or of the session have started."""
    yield
    left = _processes_of_this_run()
    findings = [_describe(process) for process in left]
    for process in left:
        process.kill()
    assert not findings, "left behind by the run: " + ", ".join(findings)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Ends what a worker has left that crashed before it could check."""
    if hasattr(session.config, "workerinput"):
        return
    left = _processes_of_this_run(of_workers=True)
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=_STOP_SECONDS)


@pytest.fixture
def eventually() -> Callable[..., None]:
    """`eventually(condition, seconds=10, what="...")`: waits until the condition holds, or fails."""

    def wait(condition: Callable[[], object], *, seconds: float = 10.0, what: str = "") -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail(f"not within {seconds:g} s: {what or getattr(condition, '__name__', condition)}")
            time.sleep(0.02)

    return wait


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with the public data sets (PADDLEWHEEL_TEST_DATA); without it the test is left out."""
    needs.require("data")
    return Path(os.environ[needs.DATA])
