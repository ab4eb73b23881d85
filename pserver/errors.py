"""Errors of this package. Each says what happened, where, and what to do about it."""

from __future__ import annotations


class PServerError(Exception):
    """Base of every error that this package raises on purpose."""


class RequirementError(PServerError, ValueError):
    """The environment cannot run a parameter server (wrong Paddle, wrong protobuf). Retrying cannot help."""


class PortInUseError(PServerError, OSError):
    """The address a server was told to listen on is taken."""


class ServerError(PServerError, ConnectionError):
    """A server did not answer in time, closed the connection, or answered with an error. A restart may help."""


class PullError(ServerError):
    """A pull failed: no value of it may be used."""


class PushError(ServerError):
    """A push failed: it may have been applied on some servers and not on others."""


class CheckpointError(PServerError, ValueError):
    """Files of sparse tables are missing, left over, damaged, or of another table than the one asked for."""
