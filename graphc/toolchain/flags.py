"""Compiler and linker flags, as explicit lists: never -march=native, never -ffast-math.

Flags that hold a path stand in `include_flags`: they are needed to compile and stay out of keys.
"""

from __future__ import annotations

import sys
from pathlib import Path

from graphc.toolchain.compiler import Compiler
from graphc.toolchain.isa import Isa

#: cpuinfo name -> (gcc and clang flag, LLVM feature for zig, oldest gcc, oldest clang)
_FEATURES: dict[str, tuple[str, str, int, int]] = {
    "ssse3": ("-mssse3", "ssse3", 0, 0),
    "sse4_1": ("-msse4.1", "sse4_1", 0, 0),
    "sse4_2": ("-msse4.2", "sse4_2", 0, 0),
    "popcnt": ("-mpopcnt", "popcnt", 0, 0),
    "cx16": ("-mcx16", "cx16", 0, 0),
    "lahf_lm": ("-msahf", "sahf", 0, 0),
    "avx": ("-mavx", "avx", 0, 0),
    "avx2": ("-mavx2", "avx2", 0, 0),
    "bmi1": ("-mbmi", "bmi", 0, 0),
    "bmi2": ("-mbmi2", "bmi2", 0, 0),
    "f16c": ("-mf16c", "f16c", 0, 0),
    "fma": ("-mfma", "fma", 0, 0),
    "abm": ("-mlzcnt", "lzcnt", 0, 0),
    "movbe": ("-mmovbe", "movbe", 0, 0),
    "avx512f": ("-mavx512f", "avx512f", 0, 0),
    "avx512bw": ("-mavx512bw", "avx512bw", 0, 0),
    "avx512cd": ("-mavx512cd", "avx512cd", 0, 0),
    "avx512dq": ("-mavx512dq", "avx512dq", 0, 0),
    "avx512vl": ("-mavx512vl", "avx512vl", 0, 0),
    "avx512_vnni": ("-mavx512vnni", "avx512vnni", 8, 6),
    "avx512_bf16": ("-mavx512bf16", "avx512bf16", 10, 9),
    "avx512vbmi": ("-mavx512vbmi", "avx512vbmi", 0, 0),
    "avx512_vbmi2": ("-mavx512vbmi2", "avx512vbmi2", 8, 6),
}

_COMMON = ("-std=c++17", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden",
           "-fvisibility-inlines-hidden", "-ffp-contract=fast", "-fno-math-errno",
           "-fno-trapping-math", "-fopenmp-simd", "-fno-plt", "-fno-semantic-interposition",
           "-fno-ident", "-g0", "-w",
           "-falign-loops=32")  # fmt: skip  # a micro-kernel loses up to 9 % at another place


def usable_features(isa: Isa, compiler: Compiler) -> tuple[str, ...]:
    """The features of `isa` that this compiler can generate code for."""
    column = 2 if compiler.kind == "gcc" else 3
    return tuple(f for f in isa.features if compiler.major >= int(_FEATURES[f][column]))


def compile_flags(isa: Isa, compiler: Compiler) -> tuple[str, ...]:
    """Everything that decides what code comes out, without paths."""
    flags = [*_COMMON, *_target_flags(isa, compiler)]
    if isa.level == "avx512":
        flags.append("-mprefer-vector-width=512")
    if compiler.kind == "gcc":
        flags += ["-frandom-seed=graphc", "-pipe"]
    if compiler.kind == "zig":
        flags += ["-fno-sanitize=undefined", "-fno-stack-protector"]
    return tuple(flags)


def _target_flags(isa: Isa, compiler: Compiler) -> list[str]:
    features = usable_features(isa, compiler)
    if compiler.kind == "zig":
        base = {"x86_64": "x86_64", "aarch64": "generic"}.get(isa.architecture, "baseline")
        cpu = "+".join([base, *(_FEATURES[f][1] for f in features)])
        return ["-target", compiler.target, f"-mcpu={cpu}"]
    base_flags = {"x86_64": ["-march=x86-64"], "aarch64": ["-march=armv8-a"]}
    return base_flags.get(isa.architecture, []) + [_FEATURES[f][0] for f in features]


def include_flags(roots: tuple[Path, ...]) -> tuple[str, ...]:
    """Where `#include "..."` looks; the folders' places do not leak into objects."""
    found: list[str] = []
    for root in roots:
        found += ["-iquote", str(root), f"-ffile-prefix-map={root}=graphc/{root.name}"]
    return tuple(found)


def link_flags(compiler: Compiler) -> tuple[str, ...]:
    """A shared library without unresolved symbols and without anything that varies per run."""
    if sys.platform == "darwin":
        return ("-dynamiclib", "-Wl,-undefined,error")
    flags = ["-shared", "-pthread", "-Wl,-z,defs", "-Wl,-z,noexecstack", "-Wl,--build-id=none",
             "-Wl,-O1", "-Wl,--as-needed"]  # fmt: skip
    if compiler.kind == "zig":
        flags += ["-target", compiler.target, "-s"]
    return tuple(flags)
