"""Headless Chromium for tests: a page's text after its scripts ran, and pictures."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from tests.support.needs import require

_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-proxy-server",
    "--force-color-profile=srgb",
)


def screenshot(url: str, file: Path, *, width: int = 1300, height: int = 1100, wait_ms: int = 3000) -> Path:
    """A PNG of the page; its scripts and timers have run for wait_ms of virtual time."""
    _chromium(f"--screenshot={file}", f"--window-size={width},{height}", f"--virtual-time-budget={wait_ms}", url)
    assert file.stat().st_size > 5000, "the picture is empty"
    return file


def dump_dom(url: str, *, wait_ms: int = 3000) -> str:
    """The document as it is after its scripts ran."""
    return _chromium("--dump-dom", f"--virtual-time-budget={wait_ms}", url)


def _chromium(*arguments: str) -> str:
    require("chromium")
    with tempfile.TemporaryDirectory() as profile:
        done = subprocess.run(
            ["chromium", *_FLAGS, f"--user-data-dir={profile}", *arguments],
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
