"""Exit codes of the command and of its processes."""

from __future__ import annotations

import os
import signal

EXIT_DONE = 0
"""All rows were trained (or evaluated)."""
EX_USAGE = os.EX_USAGE
"""The job, its data or the environment is wrong: starting again cannot help (the name is sysexits.h's)."""
EX_TEMPFAIL = os.EX_TEMPFAIL
"""Something was lost (a peer, a server, disk space): starting again may help (the name is sysexits.h's)."""
EXIT_HUNG_UP = 128 + signal.SIGHUP
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM


def describe_exit(code: int) -> str:
    """An exit status in words: 'was killed by SIGKILL', 'exited with code 64 (fix the job)'."""
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"was killed by {name}"
    meaning = {
        EXIT_DONE: " (done)",
        EX_USAGE: " (fix the job)",
        EX_TEMPFAIL: " (retry may help)",
        EXIT_HUNG_UP: " (its terminal hung up)",
        EXIT_INTERRUPTED: " (interrupted)",
        EXIT_TERMINATED: " (terminated)",
    }.get(code, "")
    return f"exited with code {code}{meaning}"
