"""Planned memory: lifetimes of buffers, their places in one arena, and the check of both."""
