"""Exports and predictions."""
