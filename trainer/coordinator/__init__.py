"""The only one that decides: membership, attempts, leases of data, checkpoint commits. See README.md."""
