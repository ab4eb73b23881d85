"""One step and one evaluation: pull ahead, compute, sum, push; metrics."""
