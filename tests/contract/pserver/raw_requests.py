"""Requests with nothing but the wire around them, to compare what servers answer bit for bit."""

import time

import numpy as np

from paddlewheel.pserver.brpc import Command, Connection
from paddlewheel.pserver.config import table_id


class RawClient:
    """One server, one table of `width`."""

    def __init__(self, endpoint, table, width):
        self.connection = Connection(endpoint, connect_timeout_seconds=5)
        self.number, self.width = table_id(table), width

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.connection.close()

    def ask(self, command, params=(), **content):
        deadline = time.monotonic() + 60
        self.connection.send(command, self.number, params, deadline=deadline, **content)
        return self.connection.receive(deadline=deadline)

    def pull(self, keys, frequency=1):
        frequencies = np.full(len(keys), frequency, np.uint32)
        attachment = [b"\x01", keys.tobytes(), frequencies.tobytes()]
        reply = self.ask(Command.PULL_SPARSE, [len(keys).to_bytes(4, "little")], attachment=attachment)
        return np.frombuffer(reply.attachment, np.float32).reshape(len(keys), 3 + self.width)

    def push(self, keys, rows):
        self.ask(Command.PUSH_SPARSE, [len(keys).to_bytes(4, "little")], data=[keys.tobytes(), rows.tobytes()])

    def save(self, directory, words=b"0"):
        self.ask(Command.SAVE_ONE_TABLE, [str(directory).encode(), words])

    def load(self, directory, words=b"0"):
        self.ask(Command.LOAD_ONE_TABLE, [str(directory).encode(), words])

    def end_day(self):
        self.ask(Command.SHRINK_TABLE, [b"0"])

    def statistics(self):
        return tuple(np.frombuffer(self.ask(Command.PRINT_TABLE_STAT).data, "<i8").tolist())
