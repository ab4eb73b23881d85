"""The state on disk or in an object store: manifest, stores, transfer between hosts."""
