"""python -m paddlewheel.deploy.docker.lock cpu|gpu: writes requirements-<extra>.txt, every package pinned with its
hash.

Run it with the image's Python (3.11, x86-64) when the dependencies in pyproject.toml change or should become newer.
Nothing is installed; pip only says what it would install.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


_CUDA = (
    # What the wheel of Paddle 2.6.2 loads: CUDA 11.8 and cuDNN 8. The image itself needs no CUDA base.
    "nvidia-cublas-cu11==11.11.3.6",
    "nvidia-cuda-nvrtc-cu11==11.8.89",
    "nvidia-cuda-runtime-cu11==11.8.89",
    "nvidia-cudnn-cu11==8.9.6.50",
    "nvidia-cufft-cu11==10.9.0.58",
    "nvidia-curand-cu11==10.3.0.86",
    "nvidia-cusolver-cu11==11.4.1.48",
    "nvidia-cusparse-cu11==11.7.5.86",
    "nvidia-nccl-cu11==2.21.5",
    "nvidia-ml-py>=12",
)
_HEADER = "# Written by `python -m paddlewheel.deploy.docker.lock {extra}` for Python 3.11 on x86-64.\n"


def lock(extra: str, root: Path) -> str:
    """The text of requirements-<extra>.txt."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"][extra], *(_CUDA if extra == "gpu" else ())]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    done = subprocess.run([*command, *wanted], check=True, capture_output=True, text=True)
    lines = []
    for item in json.loads(done.stdout)["install"]:
        name, version = item["metadata"]["name"], item["metadata"]["version"]
        digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
        lines.append(f"{name.lower().replace('_', '-')}=={version} --hash=sha256:{digest}\n")
    return _HEADER.format(extra=extra) + "".join(sorted(lines))


def main() -> int:
    """Entry point."""
    if sys.argv[1:] not in (["cpu"], ["gpu"]) or sys.version_info[:2] != (3, 11):
        sys.stderr.write(str(__doc__))
        return 64
    folder = Path(__file__).parent
    text = lock(sys.argv[1], folder.parents[1])
    (folder / f"requirements-{sys.argv[1]}.txt").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
