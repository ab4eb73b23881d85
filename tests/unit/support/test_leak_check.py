"""The guards of tests/conftest.py fire: a test of the tests."""

from __future__ import annotations

import sys

import psutil
import pytest

pytest_plugins = ["pytester"]

LEAKS = {
    "process": ("subprocess.Popen(['sleep', '60'])", "process *sleep 60*"),
    "orphan": ("subprocess.run(['sh', '-c', 'setsid sleep 61 & exit 0'])", "process *sleep 61*"),
    "port": ("s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); keep.append(s)", "port *still listened on*"),
    "temporary file": ("tempfile.mkdtemp(prefix='left-')", "temporary file *left-*"),
}


@pytest.fixture
def guarded(
    pytester: pytest.Pytester, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> pytest.Pytester:
    """An empty suite with this one's guards."""
    monkeypatch.setenv("PYTHONPATH", str(request.config.rootpath))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take longer to import than these tests to run
    pytester.makeconftest((request.config.rootpath / "tests" / "conftest.py").read_text())
    pytester.makeini("[pytest]\nmarkers = processes: checked")
    return pytester


@pytest.mark.parametrize("kind", LEAKS)
def test_leak_is_found(guarded: pytest.Pytester, kind: str) -> None:
    source, line = LEAKS[kind]
    conftest = guarded.path / "conftest.py"
    conftest.write_text(conftest.read_text().replace("_STOP_SECONDS = 10.0", "_STOP_SECONDS = 0.3"))
    guarded.makepyfile(
        "import socket, subprocess, tempfile, warnings, pytest\n"
        "keep = []\n"
        "@pytest.mark.processes\n"
        "@pytest.mark.filterwarnings('ignore::ResourceWarning')\n"
        f"def test_it():\n    {source}\n"
    )
    result = guarded.runpytest_subprocess()
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*left behind by the test:", f"*{line}"])


def test_a_tidy_test_passes(guarded: pytest.Pytester) -> None:
    guarded.makepyfile(
        "import subprocess, pytest\n@pytest.mark.processes\ndef test_it():\n    subprocess.run(['true'], check=True)\n"
    )
    guarded.runpytest_subprocess().assert_outcomes(passed=1)


WAIT = """
import pathlib, subprocess, tempfile, time, pytest

def wait_for(name):
    deadline = time.monotonic() + 60
    while not pathlib.Path(name).exists():
        assert time.monotonic() < deadline, name
        time.sleep(0.01)
"""
HOLDS = """
@pytest.mark.processes
def test_that_holds_things_while_the_other_is_checked():
    wait_for("begun")
    with tempfile.NamedTemporaryFile(), subprocess.Popen(["sleep", "60"]) as process:
        pathlib.Path("held").touch()
        wait_for("checked")
        process.kill()
"""
IS_CHECKED = """
@pytest.mark.processes
def test_that_leaves_nothing():
    pathlib.Path("begun").touch()
    wait_for("held")

def test_that_comes_after():
    pathlib.Path("checked").touch()
"""


def test_a_worker_does_not_take_for_a_leak_what_another_holds(guarded: pytest.Pytester) -> None:
    guarded.makepyfile(test_one=WAIT + HOLDS, test_other=WAIT + IS_CHECKED)
    result = guarded.runpytest_subprocess("-p", "xdist", "-n", "2", "--dist", "loadfile")
    result.assert_outcomes(passed=3)


def test_what_a_worker_that_crashed_has_left_is_ended(guarded: pytest.Pytester) -> None:
    guarded.makepyfile(
        "import os, pathlib, subprocess\n"
        "def test_it():\n"
        "    process = subprocess.Popen(['sleep', '62'], start_new_session=True)\n"
        "    pathlib.Path('pid').write_text(str(process.pid))\n"
        "    os._exit(1)\n"
    )
    result = guarded.runpytest_subprocess("-p", "xdist", "-n", "1")
    result.assert_outcomes(failed=1)
    assert not psutil.pid_exists(int((guarded.path / "pid").read_text()))


def test_what_is_started_under_nohup_can_be_interrupted(guarded: pytest.Pytester) -> None:
    guarded.makepyfile(
        "import os, signal, subprocess, pytest\n"
        "@pytest.mark.parametrize('number', [signal.SIGHUP, signal.SIGINT])\n"
        "def test_it(number):\n"
        "    os.kill(os.getpid(), number)  # this process itself goes on\n"
        "    assert subprocess.run(['sh', '-c', f'kill -{int(number)} $$; echo on']).returncode == -number\n"
    )
    tests = [sys.executable, "-m", "pytest"]
    result = guarded.run("sh", "-c", 'trap "" HUP INT; exec "$@"', "sh", *tests)
    result.assert_outcomes(passed=2)
