"""The one error that a user's data can cause."""


class DataError(ValueError):
    """Data that the job cannot use. The message names the file, the column, what was found and the remedy."""
