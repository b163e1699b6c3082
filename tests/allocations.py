"""Counts what a process takes from the heap: a library that stands before malloc."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_HOOK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
static volatile long count; static volatile int on;
void counter_start(void) { count = 0; on = 1; }
long counter_stop(void) { on = 0; return count; }
extern void* __libc_malloc(size_t); extern void* __libc_calloc(size_t, size_t);
extern void* __libc_realloc(void*, size_t); extern void* __libc_memalign(size_t, size_t);
#define COUNT if (on) __sync_fetch_and_add(&count, 1)
void* malloc(size_t n) { COUNT; return __libc_malloc(n); }
void* calloc(size_t a, size_t b) { COUNT; return __libc_calloc(a, b); }
void* realloc(void* p, size_t n) { COUNT; return __libc_realloc(p, n); }
void* memalign(size_t a, size_t n) { COUNT; return __libc_memalign(a, n); }
void* aligned_alloc(size_t a, size_t n) { COUNT; return __libc_memalign(a, n); }
int posix_memalign(void** p, size_t a, size_t n) {
  COUNT; *p = __libc_memalign(a, n); return *p ? 0 : 12;
}
"""


def run_counted(code: str, folder: Path, *, timeout: float = 60) -> None:
    """Runs Python code in a process where `hook.counter_start()` and `hook.counter_stop()` count
    allocations of all threads; checks that they do. The code has to succeed."""
    source, hook = folder / "hook.c", folder / "hook.so"
    source.write_text(_HOOK)
    subprocess.run(
        ["gcc", "-O1", "-fPIC", "-shared", str(source), "-o", str(hook)], check=True, timeout=60
    )
    before = f"""
import ctypes
hook = ctypes.CDLL({str(hook)!r})
hook.counter_start()
assert ctypes.create_string_buffer(100000) and hook.counter_stop() > 0, "the hook does not count"
"""
    environment = os.environ | {"LD_PRELOAD": str(hook)}
    subprocess.run(
        [sys.executable, "-c", before + code], check=True, cwd=ROOT, timeout=timeout,
        env=environment,
    )  # fmt: skip
