"""Errors of this package. Each says what happened, where, and what to do about it."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_FOR_GOOD = frozenset(
    {
        errno.EEXIST,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.EACCES,
        errno.EPERM,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.EINVAL,
        errno.EROFS,
    }
)


class PServerError(Exception):
    """Base of every error that this package raises on purpose."""


class RequirementError(PServerError, ValueError):
    """The environment cannot run a parameter server (wrong Paddle, wrong protobuf). Retrying cannot help."""


class PortInUseError(PServerError, OSError):
    """The address a server was told to listen on is taken."""


class ServerError(PServerError, ConnectionError):
    """A server did not answer in time, closed the connection, or answered with an error. A restart may help."""


class RefusedError(ServerError):
    """A server answered that it could not do what it was asked."""

    def __init__(self, message: str, endpoint: str) -> None:
        super().__init__(message)
        self.endpoint = endpoint


class PullError(ServerError):
    """A pull failed: no value of it may be used."""


class PushError(ServerError):
    """A push failed: it may have been applied on some servers and not on others."""


class CheckpointError(PServerError, ValueError):
    """Files of sparse tables are missing, left over, damaged, or of another table than the one asked for."""


class PathError(CheckpointError):
    """Servers cannot be told this folder: their shell would not take it for one. Trying again cannot help."""


class SaveError(PServerError, OSError):
    """Tables could not be saved: a disk is full, or what it holds is not what was written. Trying again may help."""


class LoadError(PServerError, OSError):
    """Saved tables could not be read just now, or the servers do not hold what they were told to load. Another try,
    with empty servers, may help.
    """


def is_for_good(error: OSError) -> bool:
    """Whether trying again cannot help: what was asked for is not there, is something else, or is not allowed.

    Anything else (too many open files, a disk or a mount that does not answer) may pass.
    """
    return error.errno in _FOR_GOOD


def cannot_read(path: Path, error: OSError) -> CheckpointError | LoadError:
    """What to raise for a file of saved tables that cannot be read."""
    kind = CheckpointError if is_for_good(error) else LoadError
    return kind(f"{path} cannot be read: {error}")
