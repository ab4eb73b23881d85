"""Documents made from what a run has left."""
