"""A sparse table of our own, in C++: compiled once on each machine, used inside Paddle's server or on its own.

Paddle's server makes its tables by name from a registry of classes that the wheel exports. The library here adds a
class to it (`register`), so the server, its protocol and its clients stay Paddle's, and the storage is ours. This hangs
on one build of Paddle: before anything is registered, the wheel's hash, all slots that the two use of each other, and
the update rules bit for bit are compared with what they were. Where something differs, or there is no compiler,
`NativeError` says why, and Paddle's own table does the work.

`MemoryTable` is the same table without Paddle, for tests and tools.

Legend of shapes: U keys of one call, W floats of an embedding.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paddlewheel import compiled
from paddlewheel.pserver.brpc import TableStatistics
from paddlewheel.pserver.errors import PServerError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

TABLE_CLASS = "PaddlewheelTable"
"""Under this name the registry of Paddle's classes holds ours."""

OptionValue = int | float | str | bool | tuple[float, ...]

# sha256 of libpaddle.so as the wheels of paddlepaddle 2.6.2 for Linux on x86-64 record it, by version of Python
_KNOWN_LIBRARIES = {
    "TfHrw3yhv5Eb2avP4fxdr_xk0IWDTM7yLG3K6jWGj2M": "3.10",
    "eHfj-2ZHr2PYw6qfowUNvXq4o2KaS7XFaR-rXqzn4JI": "3.11",
    "a-UaPvH3qZ0LMWo63mCbNuvpRcD24KjlUqxm0N0Sfjs": "3.12",
}
_SOURCES = Path(__file__).parent
_UNITS = ("table.cc", "library.cc", "plugin.cc", "paddle_abi.cc")
_FLAGS = (
    "-std=c++17",
    "-O2",
    "-mavx",  # what Paddle's wheel needs, too
    "-ffp-contract=off",  # a fused multiply-add would give other bits than Paddle's rules
    "-fno-math-errno",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-Wl,-z,defs",
)
_PATH_VARIABLE = "PADDLEWHEEL_TABLE_LIBRARY"


class NativeError(PServerError, ValueError):
    """Our table cannot be had here; the message says why and what helps."""


def build() -> Path:
    """Compile the library (half a minute) unless it is there; many processes may call this at once.

    It goes beside this file where that is writable, else below $XDG_CACHE_HOME (or ~/.cache).

    Raises:
        NativeError: no compiler, no place to write to, or the compiler's error.
    """
    named = os.environ.get(_PATH_VARIABLE)
    if named:
        return Path(named)
    arguments = [*_FLAGS, *(str(_SOURCES / unit) for unit in _UNITS), "-ldl", "-lpthread"]
    return compiled.build(_places(), arguments, "the table", NativeError)


def register(
    tables: Mapping[str, Mapping[str, OptionValue]], rules: Mapping[str, tuple[str, bytes]], core: Any
) -> None:
    """Have Paddle's server make these tables as ours, in this process. Call before its `init_server`.

    Args:
        tables: options of each, see options.h.
        rules: of each table, name and bytes (a SparseCommonSGDRuleParameter) of Paddle's rule that its rule must equal.
        core: Paddle's loaded C++ core.

    Raises:
        NativeError: this Paddle is another one, or a rule computes something else here.
    """
    library = _library()
    check_wheel()
    _must(library.wheel_open(str(core.__file__).encode()))
    for name, options in tables.items():
        rule, description = rules[name]
        text = _text(options)
        _must(library.wheel_check_rule(text, rule.encode(), description, len(description)))
        _must(library.wheel_register(text))


def check_start() -> None:
    """After `init_server`: Paddle goes on without a word when a table could not be made, and crashes at its first use.

    Raises:
        NativeError: a registered table was not made.
    """
    error = _library().wheel_start_error().decode()
    if error:
        raise NativeError(error)


def check_wheel() -> None:
    """NativeError unless the installed Paddle is one of the builds that were looked into."""
    for name in ("paddlepaddle", "paddlepaddle-gpu"):
        try:
            files = importlib.metadata.files(name) or ()
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.parts[-3:] == ("paddle", "base", "libpaddle.so"):
                found = file.hash.value if file.hash else "nothing"
                if found not in _KNOWN_LIBRARIES:
                    raise NativeError(
                        f"the libpaddle.so of this {name} has the sha256 {found}; known are the wheels of "
                        "paddlepaddle 2.6.2 from the public index for CPUs: tables of our own hang on the build"
                    )
                return
    raise NativeError("Paddle's wheel does not say which libpaddle.so it holds: its installation has no RECORD")


def is_expected(engine: str) -> bool:
    """Whether a server here will choose our table for this `tables.*.engine`, as far as Paddle need not tell."""
    if engine == "paddle":
        return False
    try:
        build()
        check_wheel()
    except NativeError:
        return engine == "paddlewheel"
    return True


class MemoryTable:
    """One server's table in this process. Calls may come from any thread, several at once; they raise NativeError."""

    def __init__(self, options: Mapping[str, OptionValue]) -> None:
        self._library = _library()
        self.width = int(options["width"])  # type: ignore[arg-type]
        made = self._library.wheel_table(_text(options))
        if made is None:
            raise NativeError(_error())
        self._table: ctypes.c_void_p | None = ctypes.c_void_p(made)
        self.row_bytes = int(self._library.wheel_row_bytes(self._table))

    def close(self) -> None:
        """Free it; nothing else may be called afterwards."""
        if self._table is not None:
            self._library.wheel_free(self._table)
            self._table = None

    def pull(self, keys_U: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
        """float32 [U, 3 + W]: shows, clicks, first-order weight, embedding; zeros for what is not there."""
        out = np.empty((len(keys_U), 3 + self.width), np.float32)
        self._must("pull", keys_U, len(keys_U), out)
        return out

    def push(self, keys_U: npt.NDArray[np.uint64], values: npt.NDArray[np.float32], rate: float = 1.0) -> None:
        """Trains on values float32 [U, 4 + W]: class, shows, clicks, gradients. rate: factor of the learning rate."""
        assert values.shape == (len(keys_U), 4 + self.width), values.shape
        self._must("push", keys_U, np.ascontiguousarray(values, np.float32), len(keys_U), ctypes.c_float(rate))

    def get_rows(self, keys_U: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint8]:
        """Whole rows uint8 [U, row_bytes], as parts of a saved table hold them; zeros for unknown keys."""
        out = np.empty((len(keys_U), self.row_bytes), np.uint8)
        self._must("get_rows", keys_U, len(keys_U), out)
        return out

    def set_rows(self, rows: npt.NDArray[np.uint8]) -> None:
        """Put whole rows uint8 [U, row_bytes] in place, their keys included."""
        assert rows.shape[1:] == (self.row_bytes,), rows.shape
        self._must("set_rows", np.ascontiguousarray(rows), len(rows))

    def end_day(self) -> None:
        self._must("end_day")

    def mark(self, name: str, *, advance_day: bool = False) -> None:
        self._must("mark", name, int(advance_day))

    def save(self, name: str, folder: Path, since: str = "") -> None:
        self._must("save", name, str(folder), since)

    def drop(self, name: str) -> None:
        self._must("drop", name)

    def load(self, folder: Path, name: str = "") -> None:
        self._must("load", str(folder), name)

    def statistics(self) -> TableStatistics:
        out = np.zeros(len(TableStatistics._fields), np.uint64)
        self._must("statistics", out)
        return TableStatistics(*out.tolist())

    def _must(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, f"wheel_{name}")
        _must(function(self._table, *[_argument(each) for each in arguments]))


def _argument(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        assert value.flags.c_contiguous
        return ctypes.c_void_p(value.ctypes.data)
    if isinstance(value, str):
        return value.encode()
    return ctypes.c_size_t(value) if isinstance(value, int) else value


def _text(options: Mapping[str, OptionValue]) -> bytes:
    lines = []
    for name, value in options.items():
        values = value if isinstance(value, tuple) else (value,)
        words = [
            repr(each) if isinstance(each, float) else str(int(each) if isinstance(each, bool) else each)
            for each in values
        ]
        lines.append(" ".join([name, *words]))
    return "\n".join(lines).encode()


def _must(result: int) -> None:
    if result:
        raise NativeError(_error())


def _error() -> str:
    return str(_library().wheel_error().decode(errors="replace"))


@cache
def _library() -> Any:
    path = build()
    try:
        library = ctypes.CDLL(str(path))
        library.wheel_table.restype = ctypes.c_void_p
        library.wheel_row_bytes.restype = ctypes.c_size_t
        library.wheel_error.restype = library.wheel_start_error.restype = ctypes.c_char_p
    except (OSError, AttributeError) as error:
        raise NativeError(f"{path} does not load: {error}. Delete it to have it built anew.") from error
    return library


def _places() -> list[Path]:
    return compiled.places("table", _SOURCES, [*_SOURCES.glob("*.cc"), *_SOURCES.glob("*.h")], _FLAGS)
