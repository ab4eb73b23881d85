"""Standard output and error whose readers have gone."""

from __future__ import annotations

import contextlib
import os
from typing import TextIO


def give_up(stream: TextIO) -> None:
    """What is still written to the stream is lost, and is no error when it is flushed at the end of the process."""
    with contextlib.suppress(OSError, ValueError):  # the latter: no file stands behind it
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
