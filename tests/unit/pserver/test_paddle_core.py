"""A Paddle that cannot be loaded: the error that comes first is the one that is seen, however often it is tried."""

import os
import subprocess
import sys

import pytest

_TWICE = """
from paddlewheel.pserver import paddle_core
for _ in range(2):
    try:
        paddle_core.load()
    except Exception as error:
        print(error)
"""


def errors(root):
    """What two attempts in one process say, with the package `paddle` in root."""
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", _TWICE], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.fixture
def broken(tmp_path):
    """A package `paddle` whose import ends as Paddle's does when its library was loaded in part before."""
    for path in ("base", "distributed/fleet/proto"):
        folder = tmp_path / "paddle"
        for part in path.split("/"):
            folder = folder / part
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "__init__.py").touch()
    (tmp_path / "paddle/__init__.py").touch()
    (tmp_path / "paddle/base/core.py").write_text("raise ImportError('ProgramDescTracer is already registered')")
    (tmp_path / "paddle/distributed/fleet/proto/the_one_ps_pb2.py").touch()
    return tmp_path


def test_the_library_s_error_is_seen(broken):
    (broken / "paddle/base/libpaddle.so").write_text("no library")
    found = errors(broken)
    assert len(found) == 2
    assert all("libpaddle.so" in words and "registered" not in words for words in found), found


def test_the_ordinary_import_speaks_where_the_library_lies_elsewhere(broken):
    assert errors(broken) == ["ProgramDescTracer is already registered"] * 2
