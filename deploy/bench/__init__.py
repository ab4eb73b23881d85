"""Benchmarks, parity with one process and with peers, tuning and recovery drills: everything that starts whole jobs."""
