"""What can be said of the images without a container engine: the Dockerfile, what it installs, and process 1."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.support.prometheus_server import free_port

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
DOCKERFILE = DOCKER / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", DOCKERFILE.read_text())
    lines = (line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#"))
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1].strip()) for line in lines]


def stages() -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for instruction, rest in instructions():
        if instruction == "FROM":
            name = rest.split(" AS ")[1]
            found[name] = []
        if name:
            found[name].append((instruction, rest))
    return found


def test_hadolint_has_nothing_to_say() -> None:
    tool = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([tool, DOCKERFILE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_images_run_as_a_user_with_tini_as_process_1(target: str) -> None:
    own = stages()[target]
    assert own[0] == ("FROM", f"base AS {target}")
    base = stages()["base"]
    assert own[-1] == ("USER", "10001:10001")
    assert ("ENTRYPOINT", '["tini", "--", "paddlewheel"]') in base
    assert any(instruction == "HEALTHCHECK" for instruction, _ in base)
    assert not any(instruction == "ADD" for instruction, _ in instructions())


def ignored(path: str) -> bool:
    """`.dockerignore` as the engine reads it: the last pattern that matches decides, also for what lies below it."""
    verdict = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!")
        below = [path, *(str(parent) for parent in Path(path).parents if str(parent) != ".")]
        anywhere = pattern.removeprefix("**/")
        hit = any(
            fnmatch.fnmatchcase(part, pattern)
            or (pattern.startswith("**/") and fnmatch.fnmatchcase(Path(part).name, anywhere))
            for part in below
        )
        if hit:
            verdict = not line.startswith("!")
    return verdict


def test_only_what_is_copied_reaches_the_engine() -> None:
    sources = [
        source
        for instruction, rest in instructions()
        if instruction == "COPY" and "--from" not in rest
        for source in rest.split()[:-1]
    ]
    assert len(sources) > 8
    for source in sources:
        assert (ROOT / source).exists(), source
        assert not ignored(source), source
    kept = ["trainer/agent/agent.py", "deploy/monitoring/rules.yaml", "trainer/coordinator/static/page.js"]
    assert not any(map(ignored, kept))
    left_out = [
        ".git/config",
        "tests/conftest.py",
        "runs/x/y",
        "trainer/__pycache__/a.pyc",
        "data/x",
        ".venv/bin/python",
    ]
    assert all(map(ignored, left_out))
    assert ignored("trainer/coordinator/coordinator_pb2.py"), "it is made inside, by the image's own protoc"


@pytest.mark.parametrize("extra", ["cpu", "gpu"])
def test_pins_satisfy_what_the_project_asks_for(extra: str) -> None:
    lines = [
        line for line in (DOCKER / f"requirements-{extra}.txt").read_text().splitlines() if not line.startswith("#")
    ]
    assert all(re.fullmatch(r"[a-z0-9.-]+==\S+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
    pinned = {name: Version(version) for name, version in (line.split(" ")[0].split("==") for line in lines)}
    assert len(pinned) == len(lines)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in [*project["dependencies"], *project["optional-dependencies"][extra]]:
        wanted = Requirement(text)
        name = re.sub(r"[-_.]+", "-", wanted.name).lower()
        assert name in pinned, f"{text}: run python -m paddlewheel.deploy.docker.lock {extra}"
        assert wanted.specifier.contains(pinned[name], prereleases=True), (
            f"{text}: run python -m paddlewheel.deploy.docker.lock {extra}"
        )
    assert ("paddlepaddle" in pinned) == (extra == "cpu")
    assert ("paddlepaddle-gpu" in pinned) == (extra == "gpu")


@pytest.mark.slow
def test_the_wheel_of_the_image_holds_what_runs_need(tmp_path: Path) -> None:
    """The first stage, by hand: only what it copies, with the build tools of this environment instead of fresh ones."""
    for instruction, rest in stages()["wheel"]:
        if instruction == "COPY":
            *sources, target = rest.split()
            place = tmp_path / "src" / target
            place.mkdir(parents=True, exist_ok=True)
            for source in sources:
                origin = ROOT / source
                copied = [
                    path
                    for path in ([origin] if origin.is_file() else origin.rglob("*"))
                    if (path.is_file() or path.is_symlink()) and not ignored(str(path.relative_to(ROOT)))
                ]
                for path in copied:
                    to = place / (path.name if origin.is_file() else path.relative_to(origin))
                    to.parent.mkdir(parents=True, exist_ok=True)
                    if path.is_symlink():  # `paddlewheel/` is made of them; an engine copies them as they are
                        to.symlink_to(path.readlink())
                    else:
                        to.write_bytes(path.read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", tmp_path / "wheels", tmp_path / "src"], check=True, capture_output=True)
    (wheel,) = (tmp_path / "wheels").iterdir()
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "paddlewheel/trainer/coordinator/coordinator_pb2.py",
        "paddlewheel/trainer/coordinator/static/index.html",
        "paddlewheel/trainer/coordinator/static/page.js",
        "paddlewheel/trainer/coordinator/static/page.css",
        "paddlewheel/deploy/monitoring/rules.yaml",
        "paddlewheel/deploy/docker/healthcheck.py",
        "paddlewheel/deploy/kubernetes/render.py",
    } <= names
    assert not [name for name in names if name.startswith("tests/")]


# ------------------------------------------------------------------------------------------------------------ process 1


def children(pid: int) -> list[int]:
    return [int(worker) for worker in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextlib.contextmanager
def as_process_1(*command: str, environment: dict[str, str] | None = None) -> Iterator[tuple[subprocess.Popen, int]]:
    """Runs a command as process 1 of a PID namespace, as an engine does; yields unshare, and process 1's id here."""
    outer = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *command],
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        deadline = time.monotonic() + 10
        # The container runs once process 1 has started the command.
        while not (inner := children(outer.pid)) or not children(inner[0]):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield outer, inner[0]
    finally:
        outer.kill()
        outer.communicate(timeout=10)


@pytest.mark.processes
@pytest.mark.needs("tini", "process namespaces")
@pytest.mark.parametrize("moment", ["at once", "when it listens"])
def test_sigterm_ends_a_role_that_is_in_a_container(moment: str, eventually: Callable[..., None]) -> None:
    """Process 1 has no default signal handlers: without tini a signal in the first second would be lost."""
    health = f"127.0.0.1:{free_port()}"
    role = ["paddlewheel", "role", "pserver", "--coordinator", f"127.0.0.1:{free_port()}"]
    command = [str(Path(sys.executable).with_name(role[0])), *role[1:]]
    with as_process_1("tini", "--", *command, environment={"PADDLEWHEEL_HEALTH": health}) as (outer, inner):
        if moment == "when it listens":
            eventually(lambda: healthcheck(health) == 0, seconds=60, what="the role answers its health check")
        started = time.monotonic()
        os.kill(inner, signal.SIGTERM)
        code = outer.wait(30)
        assert code == 143
        assert time.monotonic() - started < 15
        if moment == "when it listens":
            assert healthcheck(health) == 1


def healthcheck(address: str) -> int:
    environment = {**os.environ, "PADDLEWHEEL_HEALTH": address}
    return subprocess.run(
        [sys.executable, "-m", "paddlewheel.deploy.docker.healthcheck"], env=environment, check=False
    ).returncode
