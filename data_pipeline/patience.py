"""Which failures to read say something of the data, and which only of the moment; those are tried again, briefly.

What Arrow raises is told apart so: a system call that failed carries an errno, a store names itself in the message, and
what Parquet's decoders say of damage has neither.
"""

import errno
import os
import re
import time
from collections.abc import Callable
from typing import TypeVar

import pyarrow as pa

from paddlewheel.data_pipeline.errors import UnavailableError

PAUSES_SECONDS = (0.2, 1.0, 3.0)
_PATIENCE_SECONDS = 10.0
"""No attempt begins later than this after the first: a store's client has been patient itself."""

_LASTING = {
    errno.ENOENT,
    errno.EACCES,
    errno.EPERM,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.EINVAL,
    errno.EEXIST,
}
_LASTING_CLASSES = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError)
_PASSING_CLASSES = (ConnectionError, TimeoutError, InterruptedError, BlockingIOError)
_AWS = re.compile(r"AWS Error (\w+)(?: \(HTTP status (\d+)\))? during")
_GOOGLE = re.compile(r"google::cloud::Status\((\w+)")
_LASTING_WORDS = {
    "ACCESS_DENIED",
    "FAILED_PRECONDITION",
    "INCOMPLETE_SIGNATURE",
    "INVALID_ACCESS_KEY_ID",
    "INVALID_ARGUMENT",
    "INVALID_CLIENT_TOKEN_ID",
    "INVALID_OBJECT_STATE",
    "INVALID_PARAMETER_VALUE",
    "INVALID_SIGNATURE",
    "MISSING_AUTHENTICATION_TOKEN",
    "NOT_FOUND",
    "NO_SUCH_BUCKET",
    "NO_SUCH_KEY",
    "OPT_IN_REQUIRED",
    "PERMISSION_DENIED",
    "RESOURCE_NOT_FOUND",
    "SIGNATURE_DOES_NOT_MATCH",
    "UNAUTHENTICATED",
    "UNRECOGNIZED_CLIENT",
    "VALIDATION",
}
"""What stores answer to a mistake of the user's."""
_ANSWERED = {"408", "425", "429"}
_ALLOCATION = re.compile(r"alloc\w* of size (\d+) failed")

T = TypeVar("T")

UNREADABLE = (OSError, pa.ArrowException, ValueError, MemoryError)
"""What reading a file may raise, for whatever cause."""


def passes(error: BaseException) -> bool:
    """Whether a failure to read may be gone when it is tried again. Damage, and what is missing or forbidden, stay."""
    if isinstance(error, MemoryError):
        # a damaged length can ask for more memory than there is anywhere
        asked = _ALLOCATION.search(str(error))
        return asked is None or int(asked[1]) <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if isinstance(error, _LASTING_CLASSES) or not isinstance(error, OSError):
        return False
    if isinstance(error, _PASSING_CLASSES):
        return True
    if error.errno is not None:
        return error.errno not in _LASTING
    said = str(error)
    if found := _AWS.search(said):
        word, status = found.groups()
        is_refusal = status is not None and status[0] in "34" and status not in _ANSWERED
        return word not in _LASTING_WORDS and not is_refusal
    if found := _GOOGLE.search(said):
        return found[1] not in _LASTING_WORDS
    return False


def read_patiently(what: str, read: Callable[[], T]) -> T:
    """What `read` returns; a failure that may pass is tried again a few times.

    Args:
        what: says in a message what cannot be read.
        read: begins anew each time.

    Raises:
        UnavailableError: it did not pass.
        Exception: whatever else `read` raises.
    """
    began = time.monotonic()
    for pause in (*PAUSES_SECONDS, None):
        try:
            return read()
        except (OSError, MemoryError) as error:
            if not passes(error):
                raise
            if pause is None or time.monotonic() + pause - began > _PATIENCE_SECONDS:
                raise UnavailableError(
                    f"{what} cannot be read now: {str(error) or type(error).__name__}. Its data are not at fault: "
                    "trying again may help"
                ) from error
            time.sleep(pause)
    raise AssertionError("unreachable")
