"""What a trainer needs of the servers: pull, push, save, load, day boundary, statistics, stop.

Speaks the servers' own protocol (`wire`) instead of using Paddle's client; README.md says why.
Legend of shapes: U unique keys of one call, W floats of a pulled row (`TableConfig.pull_width`), S servers.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
import uuid
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paddlewheel.pserver import admin, host_parts, saved_tables
from paddlewheel.pserver.brpc import PUSH_HEADER_BITS, Buffer, Command, Connection, Reply
from paddlewheel.pserver.config import TableConfig, Tables, table_ids
from paddlewheel.pserver.errors import (
    CheckpointError,
    LoadError,
    PullError,
    PushError,
    RefusedError,
    SaveError,
    ServerError,
)
from paddlewheel.pserver.initializer import Initializer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    import numpy.typing as npt
    from typing_extensions import Self

_IS_TRAINING = b"\x01"
_SAVE, _SAVE_AND_ADVANCE_DAY = b"0", b"3"  # Paddle's modes 1 and 2 (delta, base) are not used: README.md says why
_MAX_REQUEST_BYTES = 16 << 20  # a request; brpc refuses more than 64 MiB in one message
_PULLED_COUNTS = 2  # show, click before the values
_PUSH_PREFIX = 3  # slot, show, click before the gradients
_MAX_MARKS = 64  # that our tables remember
_KEY_BYTES = 8


class Pulled(NamedTuple):
    """values_UW: effective values. shows_U, clicks_U: what the table has counted. admitted_U: has it an embedding?"""

    values_UW: npt.NDArray[np.float32]
    shows_U: npt.NDArray[np.float32]
    clicks_U: npt.NDArray[np.float32]
    admitted_U: npt.NDArray[np.bool_]


class Since(NamedTuple):
    """What a save of changes leads on from: the mark of an earlier save (or load), and what it saved, by table."""

    mark: str
    tables: Mapping[str, saved_tables.Base]


class _Table:
    def __init__(self, name: str, number: int, config: TableConfig, num_servers: int, seed: int) -> None:
        self.name, self.number, self.config = name, number, config
        self.num_shards = config.num_shards(num_servers)
        self.max_keys_per_request = max(1, _MAX_REQUEST_BYTES // (8 + 4 * (_PUSH_PREFIX + 1 + config.width)))
        self.shards_per_server = self.num_shards // num_servers
        self.initializer = Initializer(name, config, seed)
        self.bytes_per_row: float = saved_tables.max_bytes_per_row(config)  # of a save; the last save knows better
        self.is_ours: bool | None = None  # whether the servers' table is our own; None: not asked yet
        self.unused_columns = int(not config.first_order)  # servers have a first-order weight in every table

    def server_of(self, keys_U: npt.NDArray[np.uint64]) -> npt.NDArray[np.intp]:
        return ((keys_U % np.uint64(self.num_shards)) // np.uint64(self.shards_per_server)).astype(np.intp)


class Client:
    """One trainer's access to all servers. Every call may be made from any thread, and several at once.

    `load`, `load_per_host` and `end_day` rebuild the servers' hash tables, which Paddle does not lock: a pull, push or
    key count meanwhile can end a server. Calls of one client wait for each other there; others must be kept away.

    pull_timeout_seconds bounds every pull and push as a whole; slower means failed. A call that raises has not changed
    the client: connections that failed are closed, and the next call opens new ones.
    """

    def __init__(
        self,
        tables: Tables,
        endpoints: Sequence[str],
        rank: int = 0,
        num_trainers: int = 1,
        seed: int = 0,
        *,
        server_uids: Sequence[str] | None = None,
        pull_timeout_seconds: float = 10.0,
        connect_timeout_seconds: float = 5.0,
        admin_timeout_seconds: float = 3600.0,
    ) -> None:
        """endpoints: "ip:port" of every server, in rank order. Connects on first use.

        server_uids: the servers' expected UIDs (`admin.server_uid`). A different process on the same endpoint is
        rejected. None: trust the first answer. admin_timeout_seconds bounds save, load, shrink. rank and num_trainers
        are for messages only.
        """
        if not endpoints:
            raise ValueError("endpoints is empty: a client needs at least one server")
        assert 0 <= rank < num_trainers
        ids = table_ids(tables)
        self._seed = seed
        self._tables = {n: _Table(n, ids[n], config, len(endpoints), seed) for n, config in tables.items()}
        self._endpoints = tuple(endpoints)
        self._pull_timeout_seconds = pull_timeout_seconds
        self._connect_timeout_seconds = connect_timeout_seconds
        self._admin_timeout_seconds = admin_timeout_seconds
        self._lock = threading.Lock()
        self._no_push = threading.Condition(self._lock)
        self._num_pushing = 0
        self._gate = _Gate()
        self._idle: list[list[Connection]] = [[] for _ in endpoints]
        self._changes_at: dict[str, dict[str, list[tuple[int, int]]]] = {}
        self._server_uids = dict(enumerate(server_uids or ()))
        self._closed = False

    # ---- training -----------------------------------------------------------------------------------------------

    def pull(self, table: str, keys_U: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
        """Effective values float32 [U, W]: column 0 the first-order weight (if the table has one), then the embedding.

        A key that the servers do not know has first-order weight 0 and its initial embedding. A key below the table's
        admission score has embedding 0. keys_U: unique, none 0. Raises PullError; it never returns values after that.
        """
        return self.pull_with_counts(table, keys_U).values_UW

    def pull_with_counts(self, table: str, keys_U: npt.NDArray[np.uint64]) -> Pulled:
        """As `pull`, with the shows and clicks that the table has counted for each key."""
        t = self._tables[table]
        _check_keys(keys_U)
        num_floats = _PULLED_COUNTS + 1 + t.config.width
        raw_UV = np.empty((len(keys_U), num_floats), np.float32)
        with self._gate.beside_others():
            deadline = time.monotonic() + self._pull_timeout_seconds
            try:
                for shares in self._rounds(t, keys_U):
                    replies = self._ask({share.server: _pull_request(t, share.keys_N) for share in shares}, deadline)
                    for share in shares:
                        found = np.frombuffer(replies[share.server].attachment, np.float32)
                        if found.size != len(share.keys_N) * num_floats:
                            raise ServerError(
                                f"parameter server {self._endpoints[share.server]} gave {found.size} floats instead "
                                f"of {len(share.keys_N) * num_floats}: its table {table!r} has not the width "
                                f"{t.config.width}"
                            )
                        raw_UV[share.rows] = found.reshape(-1, num_floats)
            except ServerError as error:
                raise PullError(f"pull of {len(keys_U)} keys from table {table!r}: {error}") from error
            if time.monotonic() > deadline:
                raise PullError(
                    f"pull of {len(keys_U)} keys from table {table!r} took longer than {self._pull_timeout_seconds} s"
                )
        shows_U, clicks_U = raw_UV[:, 0], raw_UV[:, 1]
        admitted_U = t.initializer.admitted(shows_U, clicks_U)
        change_UW = raw_UV[:, _PULLED_COUNTS + t.unused_columns :]
        return Pulled(t.initializer.effective(change_UW, keys_U, admitted_U), shows_U, clicks_U, admitted_U)

    def push(
        self,
        table: str,
        keys_U: npt.NDArray[np.uint64],
        grads_UW: npt.NDArray[np.float32],
        shows_U: npt.NDArray[np.float32],
        clicks_U: npt.NDArray[np.float32],
        *,
        rate: float = 1.0,
    ) -> None:
        """Apply one update of the table's rule to each key; returns when all servers have applied theirs.

        grads_UW: the gradient of the loss summed over rows, summed over each key's occurrences. shows_U: occurrences
        (> 0). clicks_U: occurrences in rows with a positive label. With `gradient_reduction: mean` the rule sees
        grads / shows. rate: factor of the table's learning rate for this push; tables of Paddle's engine know only 1.
        Raises PushError.
        """
        t = self._tables[table]
        _check_keys(keys_U)
        assert rate == 1.0 or self.is_ours(table), f"table {table!r} is Paddle's: its learning rate is fixed"
        assert grads_UW.shape == (len(keys_U), t.config.pull_width), (grads_UW.shape, len(keys_U), t.config.pull_width)
        assert shows_U.shape == clicks_U.shape == keys_U.shape
        assert len(keys_U) == 0 or float(shows_U.min()) > 0, "shows must be positive"
        if not np.isfinite(grads_UW.sum()):
            raise PushError(f"push to table {table!r}: the gradients hold NaN or inf; nothing was sent")
        row_UV = np.zeros((len(keys_U), _PUSH_PREFIX + 1 + t.config.width), np.float32)
        row_UV[:, 1] = shows_U
        row_UV[:, 2] = clicks_U
        divisor = row_UV[:, 1:2] if t.config.optimizer.gradient_reduction == "mean" else np.float32(1)
        np.divide(grads_UW, divisor, out=row_UV[:, _PUSH_PREFIX + t.unused_columns :])
        with self._gate.beside_others(), self._pushing():
            deadline = time.monotonic() + self._pull_timeout_seconds
            try:
                for shares in self._rounds(t, keys_U):
                    requests = {s.server: _push_request(t, s.keys_N, row_UV[s.rows], rate) for s in shares}
                    self._ask(requests, deadline)
            except ServerError as error:
                why = self._explained(t, error)
                raise PushError(f"push of {len(keys_U)} keys to table {table!r}: {why}") from error

    def flush(self) -> None:
        """Return when every push that has begun, in any thread, has ended (pushes are applied when they return)."""
        with self._no_push:
            self._no_push.wait_for(lambda: self._num_pushing == 0)

    # ---- tables as a whole --------------------------------------------------------------------------------------

    def save(
        self, directory: Path, *, advance_day: bool | Collection[str] = False
    ) -> dict[str, saved_tables.SavedTable]:
        """Write every table to `directory/<table>/` (which must not exist yet), read it back, and describe it.

        The servers write, so the directory must be one that they and this process see under the same path. Nothing
        may be pushed meanwhile. advance_day (of all tables, or of those named): afterwards, add one to the unseen days
        of every key in the servers (not in the files). Raises CheckpointError, SaveError or ServerError; then nothing
        under `directory` counts.
        """
        self._check_paths([directory])
        num_keys = self.num_keys()
        self._check_space(directory, num_keys)
        modes = self._save_modes(advance_day)
        return {
            name: self._save_table(t, directory / name, sum(num_keys[name]), modes[name])
            for name, t in self._tables.items()
        }

    def load(self, directory: Path, *, tables: Iterable[str] | None = None) -> str | None:
        """Load tables (None: all of this client) saved by `save`, by any number of servers, into servers without keys.

        Of tables that hold only what changed, those that they lead on from are loaded first. Returns the name of a mark
        of the state that was loaded, for `save_marked` to lead on from, if all of it was saved by tables of our own,
        and is in such ones now; else None. Raises CheckpointError for anything incomplete, changed or unfitting before
        a server is asked; LoadError when the servers then hold other keys; else ServerError.
        """
        chosen = self._tables if tables is None else {name: self._tables[name] for name in tables}
        saved = {name: saved_tables.open_table(directory / name) for name in chosen}
        for name, t in chosen.items():
            saved_tables.check_fits(saved[name], name, t.config, self._seed)
            saved_tables.verify(saved[name])
        mark = uuid.uuid4().hex
        with self._gate.alone():
            for name, t in chosen.items():
                self._load_table(t, saved[name], mark)
        return self._loaded_mark(saved, mark)

    def save_bytes(self, since: Since | None = None) -> tuple[int, ...]:
        """About how many bytes a save would write on each server, in rank order; rather too many than too few.

        since: of a save of what changed after that.
        """
        with self._gate.beside_others():
            sizes = [self._save_bytes(t, self._num_keys(t), since) for t in self._tables.values()]
        return tuple(int(sum(each)) for each in zip(*sizes, strict=True))

    def save_per_host(
        self,
        directories: Sequence[Path],
        collect: Callable[[], Sequence[Mapping[str, Sequence[saved_tables.Part]]]],
        *,
        advance_day: bool | Collection[str] = False,
        mark: str | None = None,
        since: Since | None = None,
    ) -> dict[str, saved_tables.SavedTable]:
        """As `save` (or, with a mark, as `save_marked`), where each server writes below its own of the directories.

        collect: called when all are written; what `host_parts.measure` has found at each server, in rank order. Hosts
        must have room (`save_bytes`): a server whose disk is full ends its process. Raises CheckpointError, SaveError
        or ServerError; then nothing that was written counts.
        """
        try:
            self._check_paths(directories)
            num_keys = {name: sum(counts) for name, counts in self.num_keys().items()}
            modes = self._save_modes(advance_day)
            for name, t in self._tables.items():
                words = modes[name] if mark is None else _save_words(mark, since)
                self._ask_everyone(Command.SAVE_ONE_TABLE, t, [[str(d / name).encode(), words] for d in directories])
            found = collect()
        except BaseException:
            if mark is not None:
                self.drop_mark(mark)
            raise
        saved = {}
        for name, t in self._tables.items():
            parts = [by_table.get(name, ()) for by_table in found]
            kind: saved_tables.Kind = "rows" if t.is_ours else "text"
            base = since.tables[name] if since is not None else None
            saved[name] = host_parts.combine(name, t.config, self._seed, t.num_shards, parts, kind, base)
            self._check_saved(t, saved[name], num_keys[name] if mark is None else None)
        return saved

    def load_per_host(self, directories: Sequence[Path], saved: Mapping[str, saved_tables.SavedTable]) -> str | None:
        """As `load`, where each server reads below its own of the directories, made by `host_parts.lay_out` there.

        Raises CheckpointError for tables that do not fit before a server is asked, LoadError when keys are missing
        after.
        """
        for name, t in self._tables.items():
            saved_tables.check_fits(saved[name], name, t.config, self._seed)
        self._check_paths(directories)
        mark = uuid.uuid4().hex
        with self._gate.alone():
            for name, t in self._tables.items():
                if t.is_ours is None:
                    self._num_keys(t)
                for number in range(len(saved[name].links)):
                    folders = [str(host_parts.folder_of_link(d, number) / name).encode() for d in directories]
                    words = f"load {mark}".encode() if t.is_ours else _SAVE
                    self._ask_everyone(Command.LOAD_ONE_TABLE, t, [[folder, words] for folder in folders])
                self._check_loaded(t, saved[name])
        return self._loaded_mark(saved, mark)

    def is_ours(self, table: str) -> bool:
        """Whether the servers keep this table in our own engine, not in Paddle's. Raises ServerError."""
        t = self._tables[table]
        if t.is_ours is None:
            with self._gate.beside_others():
                self._num_keys(t)
        return bool(t.is_ours)

    def can_mark(self) -> bool:
        """Whether `mark` works: all tables are of our own engine. Raises ServerError."""
        return all(self.is_ours(name) for name in self._tables)

    def mark(self, *, advance_day: bool | Collection[str] = False) -> str:
        """Note the state of all tables as it is now, for a save that goes on beside pushes; returns the mark's name.

        One round trip a table; it waits for pushes under way on each server. For one state across servers nobody may
        push meanwhile. advance_day as in `save`. Servers keep one mark: a later one takes its place, unless it is being
        saved (ServerError).
        """
        name = uuid.uuid4().hex
        advanced = self._named(advance_day)
        self._remember_changes(name)
        for table, t in self._tables.items():
            words = f"mark {name} day" if table in advanced else f"mark {name}"
            self._ask_everyone(Command.SAVE_ONE_TABLE, t, self._for_all([b"/", words.encode()]))
        return name

    def save_marked(
        self, directory: Path, mark: str, *, since: Since | None = None
    ) -> dict[str, saved_tables.SavedTable]:
        """As `save`, of the state at a mark; pulls and pushes may go on. Whatever happens, the mark is used up.

        since: save only the rows that changed since that earlier save, and the keys that are gone. Servers must have
        been started to remember those. They know of all marks since their newest whole save that succeeded, but of at
        most 64; a save since another one raises ServerError.
        """
        try:
            self._check_paths([directory])
            self._check_space(directory, {name: self._num_keys(t) for name, t in self._tables.items()}, since)
            words = _save_words(mark, since)
            bases = since.tables if since is not None else {}
            return {
                name: self._save_table(t, directory / name, None, words, bases.get(name))
                for name, t in self._tables.items()
            }
        except BaseException:
            self.drop_mark(mark)
            raise

    def drop_mark(self, mark: str) -> None:
        """Forget a mark: it is not going to be saved, or its save has failed. Servers that are gone are fine."""
        for t in self._tables.values():
            with contextlib.suppress(ServerError):
                self._ask_everyone(Command.SAVE_ONE_TABLE, t, self._for_all([b"/", f"drop {mark}".encode()]))

    def end_day(self, tables: Collection[str] | None = None) -> None:
        """Day boundary of these tables (None: all): decay shows and clicks, then delete keys as `lifecycle` says.

        No other client may pull, push or count meanwhile.
        """
        with self._gate.alone():
            for name in self._named(tables is None or tables):
                if self._tables[name].config.lifecycle.show_click_decay != 1:
                    self._changes_at.clear()  # all rows change
                self._ask_everyone(Command.SHRINK_TABLE, self._tables[name], self._for_all([b"0"]))

    def num_keys(self) -> dict[str, tuple[int, ...]]:
        """Keys of each table on each server, in rank order. Servers walk through all of them for it."""
        with self._gate.beside_others():
            return {name: self._num_keys(t) for name, t in self._tables.items()}

    # ---- ending -------------------------------------------------------------------------------------------------

    def stop_servers(self) -> None:
        """Ask every server to end in order. Servers that are gone already are fine."""
        self.flush()
        deadline = time.monotonic() + self._connect_timeout_seconds
        for server in range(len(self._endpoints)):
            with contextlib.suppress(ServerError):
                self._ask({server: _Request(Command.STOP_SERVER, 0)}, deadline)

    def close(self) -> None:
        """Close the connections, those in use as soon as their call ends; later calls raise."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, [[] for _ in self._endpoints]
        for connection in (c for server in idle for c in server):
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- inside -------------------------------------------------------------------------------------------------

    def _named(self, tables: bool | Collection[str]) -> tuple[str, ...]:
        if isinstance(tables, bool):
            return tuple(self._tables) if tables else ()
        unknown = sorted(set(tables) - set(self._tables))
        assert not unknown, unknown
        return tuple(name for name in self._tables if name in tables)

    def _check_paths(self, directories: Iterable[Path]) -> None:
        """Of every folder that a server is about to be told: the names of tables are part of them."""
        for directory in directories:
            for name in self._tables:
                saved_tables.check_path(directory / name)

    def _save_modes(self, advance_day: bool | Collection[str]) -> dict[str, bytes]:
        advanced = self._named(advance_day)
        return {name: _SAVE_AND_ADVANCE_DAY if name in advanced else _SAVE for name in self._tables}

    def _num_keys(self, t: _Table) -> tuple[int, ...]:
        replies = self._ask_everyone(Command.PRINT_TABLE_STAT, t, self._for_all([]))
        ours = {admin.tells_that_it_is_ours(reply) for reply in replies}
        if len(ours) > 1:
            raise ServerError(
                f"table {t.name!r} is Paddle's own on some servers and ours on others: set tables.{t.name}.engine"
            )
        if t.is_ours is None:
            t.is_ours = ours.pop()
            if t.is_ours:
                t.bytes_per_row = saved_tables.saved_row_bytes(t.config)
        return tuple(int(np.frombuffer(reply.data, "<i8")[0]) for reply in replies)

    def _remember_changes(self, mark: str) -> None:
        """What our tables have been told before this mark, to tell later how much can have changed since."""
        if not all(t.is_ours for t in self._tables.values()):
            return  # Paddle's must not be asked for such
        self._changes_at[mark] = {name: self._changes(t) for name, t in self._tables.items()}
        while len(self._changes_at) > _MAX_MARKS:
            del self._changes_at[next(iter(self._changes_at))]

    def _changes(self, t: _Table) -> list[tuple[int, int]]:
        """Of our table, for each server: keys that were pushed so far, and keys that went."""
        found = []
        for endpoint in self._endpoints:
            host, _, port = endpoint.rpartition(":")
            told = admin.table_statistics(host, int(port), t.name, timeout_seconds=self._connect_timeout_seconds)
            found.append((told.pushed, told.evicted + told.deleted))
        return found

    def _save_bytes(self, t: _Table, num_keys_S: Sequence[int], since: Since | None) -> list[float]:
        before = None if since is None else self._changes_at.get(since.mark, {}).get(t.name)
        if before is None:
            return [num_keys * t.bytes_per_row for num_keys in num_keys_S]
        return [
            min(num_keys, pushed - pushed_before) * t.bytes_per_row + _KEY_BYTES * (gone - gone_before)
            for num_keys, (pushed, gone), (pushed_before, gone_before) in zip(
                num_keys_S, self._changes(t), before, strict=True
            )
        ]

    def _check_space(self, directory: Path, num_keys: Mapping[str, Sequence[int]], since: Since | None = None) -> None:
        """A server whose disk is full while it saves ends its process. So look first, as far as one can."""
        needed = sum(sum(self._save_bytes(t, num_keys[name], since)) for name, t in self._tables.items())
        parent = next(folder for folder in (directory, *directory.parents) if folder.exists())
        free = shutil.disk_usage(parent).free
        if free < needed:
            total = sum(map(sum, num_keys.values()))
            raise SaveError(
                f"a save of {total} keys needs about {needed / 1e6:.1f} MB, but {parent} has "
                f"{free / 1e6:.1f} MB left: make room, or save elsewhere"
            )

    def _save_table(
        self,
        t: _Table,
        directory: Path,
        num_keys: int | None,
        words: bytes,
        base: saved_tables.Base | None = None,
    ) -> saved_tables.SavedTable:
        try:
            directory.mkdir(parents=True)
        except FileExistsError as error:
            raise CheckpointError(f"table {t.name!r} cannot be saved: {error}") from error
        except OSError as error:
            raise SaveError(f"table {t.name!r} cannot be saved: {error}") from error
        self._ask_everyone(Command.SAVE_ONE_TABLE, t, self._for_all([str(directory).encode(), words]))
        saved = saved_tables.record(directory, t.name, t.config, self._seed, t.num_shards, base=base)
        self._check_saved(t, saved, num_keys)
        return saved

    @staticmethod
    def _check_saved(t: _Table, saved: saved_tables.SavedTable, num_keys: int | None) -> None:
        """num_keys: that the servers had; None: nobody knows, since they were trained on meanwhile."""
        if num_keys is not None and saved.num_rows != num_keys:
            raise SaveError(
                f"{saved.directory} holds {saved.num_rows} rows after the save, but the servers held {num_keys} keys "
                f"of table {t.name!r}: was something pushed meanwhile, or is the disk full?"
            )
        if saved.num_rows and saved.base is None:
            t.bytes_per_row = 1.1 * saved.num_bytes / saved.num_rows

    def _load_table(self, t: _Table, saved: saved_tables.SavedTable, mark: str) -> None:
        self._num_keys(t)
        if t.is_ours and saved.base is not None:
            for link in saved.links:
                saved_tables.check_path(link.directory)
                params = [str(link.directory).encode(), f"load {mark}".encode()]
                self._ask_everyone(Command.LOAD_ONE_TABLE, t, self._for_all(params))
        else:
            with saved_tables.staged(saved, t.num_shards, "rows" if t.is_ours else "text") as path:
                params = [str(path).encode(), f"load {mark}".encode() if t.is_ours else _SAVE]
                self._ask_everyone(Command.LOAD_ONE_TABLE, t, self._for_all(params))
        self._check_loaded(t, saved)

    def _loaded_mark(self, saved: Mapping[str, saved_tables.SavedTable], mark: str) -> str | None:
        """The mark, if something can lead on from it: it is one of all tables."""
        leads_on = saved.keys() == self._tables.keys() and all(
            t.is_ours and saved[name].kind == "rows" for name, t in self._tables.items()
        )
        if leads_on:
            self._remember_changes(mark)
        return mark if leads_on else None

    def _check_loaded(self, t: _Table, saved: saved_tables.SavedTable) -> None:
        num_keys = sum(self._num_keys(t))
        if num_keys != saved.num_keys:
            raise LoadError(
                f"the servers hold {num_keys} keys of table {t.name!r} after loading {saved.num_keys} keys from "
                f"{saved.directory}: load into empty servers, and start them again after a failed load"
            )

    def _rounds(self, t: _Table, keys_U: npt.NDArray[np.uint64]) -> Iterator[list[_Share]]:
        """Which rows go to which server, in rounds of at most one request to each."""
        num_servers = len(self._endpoints)
        rows_S: list[npt.NDArray[np.intp] | range] = [range(len(keys_U))]
        if num_servers > 1:
            server_U = t.server_of(keys_U)
            rows_S = [np.flatnonzero(server_U == server) for server in range(num_servers)]
        for start in range(0, max(map(len, rows_S)), t.max_keys_per_request):
            shares = []
            for server, rows in enumerate(rows_S):
                some = rows[start : start + t.max_keys_per_request]
                if len(some):
                    part = slice(some.start, some.stop) if isinstance(some, range) else some
                    shares.append(_Share(server, part, keys_U[part]))
            yield shares

    def _ask(self, requests: Mapping[int, _Request], deadline: float) -> dict[int, Reply]:
        """Send each server its request, then collect the answers: all servers work at once."""
        connections: dict[int, Connection] = {}
        try:
            for server, request in requests.items():
                connections[server] = self._connection(server)
                connections[server].send(*request, deadline=deadline)
            replies = {server: connection.receive(deadline=deadline) for server, connection in connections.items()}
        except BaseException:
            for connection in connections.values():
                connection.close()
            raise
        with self._lock:
            if not self._closed:
                for server, connection in connections.items():
                    self._idle[server].append(connection)
                return replies
        for connection in connections.values():
            connection.close()
        return replies

    def _for_all(self, params: list[bytes]) -> list[list[bytes]]:
        return [params] * len(self._endpoints)

    def _ask_everyone(self, command: Command, t: _Table, params_S: Sequence[list[bytes]]) -> list[Reply]:
        """One answer of each server, in rank order."""
        deadline = time.monotonic() + self._admin_timeout_seconds
        assert len(params_S) == len(self._endpoints)
        try:
            replies = self._ask({s: _Request(command, t.number, params) for s, params in enumerate(params_S)}, deadline)
        except ServerError as error:
            raise ServerError(self._explained(t, error)) from error
        return list(replies.values())

    def _explained(self, t: _Table, error: ServerError) -> str:
        """The error, and what our own table says about it: Paddle's answers have no words of its tables."""
        if not t.is_ours or not isinstance(error, RefusedError):
            return str(error)
        try:
            connection = Connection(error.endpoint, connect_timeout_seconds=self._connect_timeout_seconds)
            try:
                words = admin.last_error(connection, t.number, time.monotonic() + self._connect_timeout_seconds)
            finally:
                connection.close()
        except ServerError:
            return str(error)
        return f"{error}: {words}"

    def _connection(self, server: int) -> Connection:
        with self._lock:
            if self._closed:
                raise ServerError("this client is closed")
            if self._idle[server]:
                return self._idle[server].pop()
        connection = Connection(self._endpoints[server], connect_timeout_seconds=self._connect_timeout_seconds)
        try:
            self._check_server_uid(server)
        except BaseException:
            connection.close()
            raise
        return connection

    def _check_server_uid(self, server: int) -> None:
        """A server that was restarted in between is empty: its keys would come back as if they were new."""
        endpoint = self._endpoints[server]
        host, port = endpoint.rsplit(":", 1)
        found = admin.server_uid(host.strip("[]"), int(port), timeout_seconds=self._connect_timeout_seconds)
        with self._lock:
            known = self._server_uids.setdefault(server, found)
        if known != found:
            raise ServerError(f"parameter server {endpoint} is not the process that it was: it has lost its tables")

    @contextlib.contextmanager
    def _pushing(self) -> Iterator[None]:
        with self._lock:
            self._num_pushing += 1
        try:
            yield
        finally:
            with self._no_push:
                self._num_pushing -= 1
                self._no_push.notify_all()


class _Gate:
    """Many at a time, or one alone. Who wants to be alone goes before those who come later."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_inside = self._num_waiting = 0
        self._is_alone = False

    @contextlib.contextmanager
    def beside_others(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_alone and not self._num_waiting)
            self._num_inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_inside -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        with self._changed:
            self._num_waiting += 1
            try:
                self._changed.wait_for(lambda: not self._is_alone and not self._num_inside)
            finally:
                self._num_waiting -= 1
            self._is_alone = True
        try:
            yield
        finally:
            with self._changed:
                self._is_alone = False
                self._changed.notify_all()


class _Share(NamedTuple):
    server: int
    rows: slice | npt.NDArray[np.intp]
    keys_N: npt.NDArray[np.uint64]


class _Request(NamedTuple):
    """Arguments of Connection.send."""

    command: Command
    table: int
    params: Sequence[bytes] = ()
    data: Sequence[Buffer] = ()
    attachment: Sequence[Buffer] = ()


def _pull_request(t: _Table, keys_N: npt.NDArray[np.uint64]) -> _Request:
    frequencies_N = np.ones(len(keys_N), np.uint32)
    attachment: list[Buffer] = [_IS_TRAINING, _buffer(keys_N), _buffer(frequencies_N)]
    return _Request(Command.PULL_SPARSE, t.number, [_count(keys_N)], attachment=attachment)


def _push_request(t: _Table, keys_N: npt.NDArray[np.uint64], row_NV: npt.NDArray[np.float32], rate: float) -> _Request:
    if rate == 1.0:
        return _Request(Command.PUSH_SPARSE, t.number, [_count(keys_N)], data=[_buffer(keys_N), _buffer(row_NV)])
    head_V = np.zeros(row_NV.shape[1], np.float32)
    head_V[:1].view(np.uint32)[0], head_V[2] = PUSH_HEADER_BITS, rate
    data: list[Buffer] = [bytes(8), _buffer(keys_N), _buffer(head_V), _buffer(row_NV)]
    return _Request(Command.PUSH_SPARSE, t.number, [(len(keys_N) + 1).to_bytes(4, "little")], data=data)


def _save_words(mark: str, since: Since | None) -> bytes:
    return (f"save {mark}" if since is None else f"save {mark} since {since.mark}").encode()


def _count(keys_N: npt.NDArray[np.uint64]) -> bytes:
    return len(keys_N).to_bytes(4, "little")


def _buffer(array: npt.NDArray[np.generic]) -> memoryview:
    return np.ascontiguousarray(array).data.cast("B")


def _check_keys(keys_U: npt.NDArray[np.uint64]) -> None:
    assert keys_U.dtype == np.uint64, keys_U.dtype
    assert keys_U.ndim == 1, keys_U.shape
    assert bool(keys_U.all()), "key 0 means padding and is never pulled or pushed"
