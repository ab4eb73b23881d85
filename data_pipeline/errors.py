"""The errors of reading: what a user's data can cause, and what passes by itself."""


class DataError(ValueError):
    """Data that the job cannot use. The message names the file, the column, what was found and the remedy."""


class UnreadableError(DataError):
    """Rows that a file promises and does not give: `data.on_bad_file` says what then happens."""


class ChangedError(DataError):
    """A file is not the one that was planned with. `on_bad_file: skip` does not leave it out: others count on it."""


class UnavailableError(RuntimeError):
    """Data that cannot be read now, through no fault of theirs: a store or a disk that does not answer, no file
    descriptor or memory left. Trying again may help, and nothing is left out because of it.
    """
