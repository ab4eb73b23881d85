"""The guards of tests/conftest.py fire: a test of the tests."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

LEAKS = {
    "process": ("subprocess.Popen(['sleep', '60'])", "process *sleep 60*"),
    "orphan": ("subprocess.run(['sh', '-c', 'setsid sleep 61 & exit 0'])", "process *sleep 61*"),
    "port": ("s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); keep.append(s)", "port *still listened on*"),
    "temporary file": ("tempfile.mkdtemp(prefix='left-')", "temporary file *left-*"),
}


@pytest.mark.parametrize("kind", LEAKS)
def test_leak_is_found(
    pytester: pytest.Pytester, kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(request.config.rootpath))
    source, line = LEAKS[kind]
    conftest = (
        (request.config.rootpath / "tests" / "conftest.py")
        .read_text()
        .replace("_STOP_SECONDS = 10.0", "_STOP_SECONDS = 0.3")
    )
    pytester.makeconftest(conftest)
    pytester.makeini("[pytest]\nmarkers = processes: checked")
    pytester.makepyfile(
        "import socket, subprocess, tempfile, warnings, pytest\n"
        "keep = []\n"
        "@pytest.mark.processes\n"
        "@pytest.mark.filterwarnings('ignore::ResourceWarning')\n"
        f"def test_it():\n    {source}\n"
    )
    result = pytester.runpytest_subprocess("-p", "no:randomly")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*left behind by the test:", f"*{line}"])


def test_a_tidy_test_passes(
    pytester: pytest.Pytester, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(request.config.rootpath))
    pytester.makeconftest((request.config.rootpath / "tests" / "conftest.py").read_text())
    pytester.makeini("[pytest]\nmarkers = processes: checked")
    pytester.makepyfile(
        "import subprocess, pytest\n@pytest.mark.processes\ndef test_it():\n    subprocess.run(['true'], check=True)\n"
    )
    pytester.runpytest_subprocess("-p", "no:randomly").assert_outcomes(passed=1)
