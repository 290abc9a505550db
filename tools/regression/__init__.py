"""Runs lists of regression cases: docs/regression.md."""
