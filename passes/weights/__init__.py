"""Passes over how weights are stored."""
