"""`paddlewheel doctor`: what lacks is found, and each finding has a remedy."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from paddlewheel.data_pipeline import native as encoder
from paddlewheel.deploy.checks import doctor
from paddlewheel.deploy.checks.doctor import Finding
from paddlewheel.deploy.cli import run
from paddlewheel.trainer.kernels.cpu import NativeError


def only(found: object) -> Finding:
    (finding,) = found  # type: ignore[misc]
    return finding


def test_this_environment_can_run_a_job() -> None:
    findings = doctor.examine()
    assert [finding for finding in findings if finding.level == "fail"] == []
    assert {"Python", "Paddle", "processor", "memory", "loopback", "GPU"} <= {finding.what for finding in findings}


def test_what_does_not_fit_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.version_info", (3, 13, 0))
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    monkeypatch.setattr("resource.getrlimit", lambda _: (256, 512))
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=1 << 30, available=1 << 29))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    for check, level, word in [
        (doctor._python, "fail", "3.12"),
        (doctor._system, "fail", "x86-64"),
        (doctor._processor, "warn", "one core"),
        (doctor._limits, "warn", "ulimit"),
        (doctor._memory, "warn", "fewer roles"),
        (doctor._shared_memory, "warn", "--shm-size"),
    ]:
        finding = only(check())
        assert (finding.level, word in finding.remedy) == (level, True), finding
    assert {finding.level for finding in doctor._disk()} == {"warn"}


@pytest.mark.parametrize(
    ("instructions", "told"), [(0x7, "means float32, and `bfloat16` is refused"), (0xE7, "means bfloat16")]
)
def test_what_the_processor_multiplies_is_told(monkeypatch: pytest.MonkeyPatch, instructions: int, told: str) -> None:
    monkeypatch.setattr("paddlewheel.trainer.kernels.cpu.build", lambda: Path("tower.so"))
    monkeypatch.setattr("paddlewheel.trainer.kernels.cpu._instructions", lambda: instructions)
    finding = only(doctor._operators())
    assert finding.level == "ok"
    assert told in finding.found


def test_the_operators_are_built_or_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:

    def fail() -> None:
        raise NativeError("no C++ compiler was found. Install one.")

    monkeypatch.setattr("paddlewheel.trainer.kernels.cpu.build", fail)
    finding = only(doctor._operators())
    assert (finding.level, finding.remedy) == ("warn", "no C++ compiler was found. Install one.")


def test_the_encoder_is_native_or_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:

    def fail() -> None:
        raise encoder.NativeError("no C++ compiler was found. Install one.")

    monkeypatch.setattr(encoder, "load", lambda: None)
    monkeypatch.setattr(encoder, "build", lambda: Path("rows.so"))
    assert only(doctor._encoder()).found.startswith("native (rows.so)")
    monkeypatch.setattr(encoder, "load", fail)
    finding = only(doctor._encoder())
    assert (finding.level, finding.remedy) == ("warn", "no C++ compiler was found. Install one.")


def _answers(monkeypatch: pytest.MonkeyPatch, code: int, output: str = "", error: str = "") -> None:
    def answer(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, code, output, error)

    monkeypatch.setattr("subprocess.run", answer)


def test_a_wrong_paddle_is_told_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    _answers(
        monkeypatch,
        1,
        error="Traceback\npaddlewheel.pserver.errors.RequirementError: paddlepaddle 3.0.0 is installed; ...\n",
    )
    finding = only(doctor._paddle())
    assert (finding.level, finding.found) == ("fail", "paddlepaddle 3.0.0 is installed; ...")


def test_the_engine_of_tables_is_told_or_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "NativeError: tables.t.engine is 'paddlewheel', which needs our own engine, but: no C++ compiler was found."
    _answers(monkeypatch, 1, error=words)
    finding = only(doctor._tables())
    assert (finding.level, finding.remedy) == ("warn", "no C++ compiler was found.")
    _answers(monkeypatch, 0)
    assert only(doctor._tables()).level == "ok"


def test_a_paddle_that_ends_the_process_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    _answers(monkeypatch, -4)
    assert "ended with status -4" in only(doctor._paddle()).found


@pytest.mark.parametrize(("capability", "level"), [("7.0", "ok"), ("9.0", "ok"), ("6.1", "warn")])
def test_gpus_that_the_kernels_are_too_new_for(monkeypatch: pytest.MonkeyPatch, capability: str, level: str) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    _answers(monkeypatch, 0, output=f"NVIDIA X, {capability}, 580.1\n")
    finding = next(iter(doctor._gpu()))
    assert (finding.level, bool(finding.remedy)) == (level, level == "warn")


def test_what_a_gpu_lacks_has_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PADDLEWHEEL_GPU_DIRECTORY", str(tmp_path))
    for name in ("nvcc", "cublas_library", "nccl_library"):
        monkeypatch.setattr(doctor.gpu_native, name, lambda: None)
    found = {finding.what: finding for finding in doctor._gpu_software(2)}
    assert {finding.level for finding in found.values()} == {"warn"}
    assert "CUDA toolkit" in found["GPU kernels"].remedy
    assert "nvidia-cublas" in found["cuBLAS"].remedy
    assert "nvidia-nccl" in found["NCCL"].remedy
    assert "NCCL" not in {finding.what for finding in doctor._gpu_software(1)}
    monkeypatch.setattr(doctor.gpu_native, "nvcc", lambda: tmp_path / "nvcc")
    assert "paddlewheel gpu build" in next(iter(doctor._gpu_software(1))).remedy
    doctor.gpu_native.kernels_path().write_text("")
    assert next(iter(doctor._gpu_software(1))).level == "ok"


def test_missing_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "versions", lambda: {"numpy": "2"})
    finding = only(doctor._libraries())
    assert finding.level == "fail"
    assert "pyarrow" in finding.found


@pytest.mark.parametrize(("level", "code"), [("ok", 0), ("warn", 0), ("fail", 64)])
def test_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], level: str, code: int) -> None:
    finding = Finding(level, "thing", "[found]", "do [this]")  # type: ignore[arg-type]
    monkeypatch.setattr(doctor, "examine", lambda: [finding])
    assert run(["doctor"]) == code
    told = capsys.readouterr().out
    assert "[found]" in told
    assert "do [this]" in told
    assert run(["doctor", "--json"]) == code
    assert json.loads(capsys.readouterr().out) == [
        {"level": level, "what": "thing", "found": "[found]", "remedy": "do [this]"}
    ]


def test_a_container_s_memory_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[[Path], str] = Path.read_text
    monkeypatch.setattr(Path, "exists", lambda path: str(path).startswith("/sys/fs/cgroup/memory.max"))
    monkeypatch.setattr(
        Path, "read_text", lambda path: f"{1 << 30}\n" if str(path).endswith("memory.max") else real(path)
    )
    finding = only(doctor._memory())
    assert finding.level == "warn"
    assert "limited to 1.0 GiB by the container" in finding.found
