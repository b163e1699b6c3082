"""The persistent kernel cache: bytes and keys, and nothing of graphs (see docs/cache.md)."""
