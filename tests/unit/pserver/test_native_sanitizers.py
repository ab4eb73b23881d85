"""The table alone, used by many threads, under sanitizers: no race, no stray access, nothing undefined."""

import subprocess
from pathlib import Path

import pytest

import paddlewheel.pserver.native

SOURCES = Path(paddlewheel.pserver.native.__file__).parent


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.needs("g++")
@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_many_threads_on_one_table(tmp_path, sanitizers):
    program, folder = tmp_path / "table_test", tmp_path / "saved"
    folder.mkdir()
    flags = ["-std=c++17", "-O1", "-g", "-mavx", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
    flags += [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    sources = [str(SOURCES / name) for name in ("table.cc", "table_test.cc")]
    subprocess.run(["g++", *flags, *sources, "-o", str(program), "-lpthread"], check=True)
    done = subprocess.run([str(program), str(folder)], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("rows") == 4
