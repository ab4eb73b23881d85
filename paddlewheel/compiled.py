"""Shared libraries of our own C++: where they lie, and how they are compiled once on each machine.

The tables, the encoder of rows and the operators for CPUs are made so; each says what it is made from and what its
absence means.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

NO_COMPILER = "no C++ compiler was found. Install one (Debian, Ubuntu: apt-get install g++) or set CXX."


def compiler() -> str | None:
    """Path of the C++ compiler ($CXX, else g++); None when there is none."""
    return shutil.which(os.environ.get("CXX") or "g++")


def places(name: str, folder: Path, sources: Iterable[Path], flags: Sequence[str], *more: str) -> list[Path]:
    """Where a library may lie, best first: in `folder`, or below $XDG_CACHE_HOME (else ~/.cache).

    Its file name changes with everything that it is made from: `sources`, `flags`, and whatever else `more` names.
    """
    digest = hashlib.sha256(" ".join(flags).encode())
    for source in sorted(sources):
        digest.update(source.read_bytes())
    for text in more:
        digest.update(text.encode())
    file = f"{name}-{digest.hexdigest()[:12]}-{sysconfig.get_platform()}.so"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    return [folder / file, cache / "paddlewheel" / file]


def build(candidates: Sequence[Path], arguments: Sequence[str], what: str, error: type[Exception]) -> Path:
    """The first of the candidates that is there, else compiled at the first that can be written to.

    Many processes may call this at once: one compiles, and the file appears whole.

    Args:
        candidates: see `places`.
        arguments: of the compiler, but for its output.
        what: name of the library in messages, such as "the table".
        error: raised when there is no compiler, no place to write to, or the compiler fails.
    """
    for place in candidates:
        if place.is_file():
            return place
    program = compiler()
    if program is None:
        raise error(NO_COMPILER)
    target = next((place for place in candidates if is_writable(place.parent)), None)
    if target is None:
        raise error(f"none of {', '.join(str(p.parent) for p in candidates)} can be written to; set XDG_CACHE_HOME.")
    with (target.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_file():
            draft = target.with_suffix(".draft")
            command = [program, *arguments, "-o", str(draft)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                draft.unlink(missing_ok=True)
                raise error(f"{program} could not compile {what}: {done.stderr.strip()[-2000:]}")
            draft.replace(target)
    return target


def is_writable(directory: Path) -> bool:
    """Whether files can be made in a folder, which is made if need be."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(directory, os.W_OK)
