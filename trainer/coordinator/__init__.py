"""The only one that decides: membership, incarnations, leases of data, checkpoint commits. See README.md."""
