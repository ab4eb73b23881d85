"""What a test needs and does not find: it is left out and told, or fails where CI says so. A test of the tests."""

from __future__ import annotations

import re

import pytest

from tests.support.needs import NEEDS

pytest_plugins = ["pytester"]

NOT_HERE = "no-such-program"
TESTS = f"""
import pytest
from tests.support import needs

needs.NEEDS["thing"] = needs._program("{NOT_HERE}", "thing-package")
needs.NEEDS["instruction"] = needs.Need(lambda: False, "another processor", False)
needs.NEEDS["air"] = needs.Need(lambda: True, "nothing")

@pytest.fixture
def expensive():
    raise AssertionError("made for a test that is left out")

@pytest.mark.needs("air", "thing")
def test_by_mark(expensive): ...

@pytest.mark.parametrize("number", [1, 2])
def test_by_call(number):
    needs.require("thing")

@pytest.fixture(scope="module")
def certificate():
    needs.require("instruction")

def test_by_fixture(certificate): ...

@pytest.mark.needs("air")
def test_that_finds_what_it_needs(): ...

@pytest.mark.skip(reason="on another ground")
def test_of_another_kind(): ...
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Runs TESTS (or others) under the suite's own conftest."""
    root = request.config.rootpath
    monkeypatch.setenv("PYTHONPATH", str(root))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take longer to import than these tests to run
    monkeypatch.delenv("PADDLEWHEEL_TEST_STRICT", raising=False)
    pytester.makeconftest((root / "tests" / "conftest.py").read_text())
    pytester.makeini("[pytest]\nmarkers =\n    processes: checked\n    needs: looked up\n")

    def run(*arguments: str, tests: str = TESTS) -> pytest.RunResult:
        pytester.makepyfile(tests)
        return pytester.runpytest_subprocess(*arguments)

    return run


@pytest.mark.parametrize("workers", [(), ("-p", "xdist", "-n", "2")], ids=["in one process", "in two"])
def test_what_is_missing_leaves_tests_out_and_is_told_once(suite, workers: tuple[str, ...]) -> None:
    result = suite(*workers)
    result.assert_outcomes(passed=1, skipped=5)
    result.stdout.fnmatch_lines(
        [
            "tests  left out for want of  what brings it",
            "    3  thing                 apt-get install thing-package",
            "    1  instruction           another processor",
            "    1  other reasons         see -rs",
        ]
    )


def test_in_ci_it_fails_unless_no_package_brings_it(suite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDLEWHEEL_TEST_STRICT", "1")
    result = suite()
    result.assert_outcomes(passed=1, skipped=2, errors=1, failed=2)
    result.stdout.fnmatch_lines(["*needs thing: apt-get install thing-package (PADDLEWHEEL_TEST_STRICT is set*"])


def test_a_run_that_leaves_nothing_out_has_no_table(suite) -> None:
    result = suite(tests="def test_it(): ...")
    result.stdout.no_fnmatch_line("*left out*")


def test_a_need_that_nobody_knows_is_an_error(suite) -> None:
    result = suite(tests="import pytest\n@pytest.mark.needs('promtol')\ndef test_it(): ...")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*KeyError: 'promtol'*"])


def test_the_table_holds_what_tests_ask_for_and_nothing_else(request: pytest.FixtureRequest) -> None:
    folder = request.config.rootpath / "tests"
    sources = [path.read_text() for path in folder.rglob("*.py") if path.name not in {"test_needs.py", "needs.py"}]
    calls = re.findall(r"\b(?:needs|require)\(((?:\"[\w +]+\"(?:, )?)+)\)", "\n".join(sources))
    assert {name for call in calls for name in re.findall(r"\"([\w +]+)\"", call)} == NEEDS.keys()
