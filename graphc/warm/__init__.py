"""Warm builds: what determines a model, and what earlier builds of the same left behind.

identity    versions and digests of graphc itself, packages and files
watch       what the user's code reads while it makes a model
observed    those readings, kept, and whether they still hold
captures    captured graphs as one file
builds      the keys of a build, and the way from a model to a finished plan without capturing it

Nothing here imports torch before a captured graph is read; see docs/cache.md.
"""
