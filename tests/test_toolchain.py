"""Compiler discovery, instruction sets, flags, and real compiles and links."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from cache.store import Store
from graphc.cpu import EXTRA, V2, V3, V4, architecture
from graphc.errors import CacheMissError, CompileError
from graphc.lowering.context import Unit
from graphc.toolchain import compiler as compiler_module
from graphc.toolchain import isa as isa_module
from graphc.toolchain.compile import UnitResult, compile_units
from graphc.toolchain.compiler import Compiler, parse_version
from graphc.toolchain.flags import compile_flags, link_flags
from graphc.toolchain.isa import Isa
from graphc.toolchain.link import link
from graphc.toolchain.sources import included, kernel_fields
from tests.kernel_build import TARGET_OF

HOME = Path(__file__).resolve().parents[1]
GCC = Compiler(("g++",), "gcc", "12.2.0", 12, "x86_64-linux-gnu")
OTHERS = [
    Compiler(("clang++",), "clang", "clang version 15.0.7", 15, "x86_64-pc-linux-gnu"),
    Compiler(("zig", "c++"), "zig", "0.17 clang version 22.1.8", 22, "x86_64-linux-gnu"),
]
SUM = """#include "abi.h"
#include "num.h"
GC_EXPORT void {name}(const gc_args* a, int64_t begin, int64_t end) {{
  const float* x = (const float*)a->ptr[0];
  float* y = (float*)a->ptr[1];
  for (int64_t i = begin; i < end; i++) y[i] = x[i] * {factor}f + (float)gc::bf16(x[i]);
}}
"""


class Arguments(ctypes.Structure):
    """gc_args of abi.h."""

    _fields_ = (
        ("ptr", ctypes.POINTER(ctypes.c_void_p)),
        ("imm", ctypes.POINTER(ctypes.c_int64)),
        ("scratch", ctypes.c_void_p),
    )


def unit(name: str, factor: float = 2.0) -> Unit:
    return Unit(name, SUM.format(name=name, factor=factor))


def found_levels() -> list[str]:
    best = Isa.detect().level
    return list(isa_module.ISAS[: isa_module.ISAS.index(best) + 1])


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """One cache for the tests that run the real compiler."""
    try:
        Compiler.discover()
    except CompileError as error:
        pytest.skip(error.what)
    return Store(tmp_path_factory.mktemp("cache"))


# -- discovery --------------------------------------------------------------------------------


def script(path: Path, text: str) -> str:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return str(path)


def test_cxx_is_taken_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    answer = f'echo run >> {log}\necho "Target: riscv64-linux-gnu" >&2\n'
    answer += 'echo "gcc version 13.1.0 (Mine 1)" >&2\n'
    monkeypatch.setenv("CXX", script(tmp_path / "mine", answer))
    found = Compiler.discover()
    assert found.identity == "gcc 13.1.0 (Mine 1)"
    assert found.target == "riscv64-linux-gnu"
    assert Compiler.discover() is found
    assert log.read_text() == "run\n"  # asked once per process
    assert str(tmp_path) not in repr(kernel_fields(unit("k"), Isa.detect(), found))


def test_a_bad_cxx_is_an_error_not_a_fallback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "absent"))
    with pytest.raises(CompileError, match="named by CXX cannot be used.*not found"):
        Compiler.discover()
    monkeypatch.setenv("CXX", script(tmp_path / "other", "echo tcc version 0.9"))
    with pytest.raises(CompileError, match="neither"):
        Compiler.discover()
    monkeypatch.setenv("CXX", "'open quote")
    with pytest.raises(CompileError, match="expected a command in CXX"):
        Compiler.discover()


def test_without_any_compiler_it_says_what_was_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(compiler_module, "_zig_command", lambda: None)
    with pytest.raises(CompileError) as caught:
        Compiler.discover()
    message = caught.value.message()
    assert caught.value.exit_code == 4
    for part in ("g++: not found", "clang++: not found", "ziglang", 'pip install "graphc[tool'):
        assert part in message


def test_an_old_compiler_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path / "g++", 'echo "Target: x\ngcc version 4.8.5 (Red Hat)"')
    script(tmp_path / "clang++", 'echo "clang version 16.0.6\nTarget: x86_64-pc-linux-gnu"')
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Compiler.discover().identity == "clang clang version 16.0.6"


def test_zig_names_its_target_without_the_kernel_version() -> None:
    text = "clang version 22.1.8\nTarget: x86_64-unknown-linux6.18.44-gnu2.36.0\n"
    found = parse_version(("/p/zig", "c++"), text)
    assert found is not None and found.kind == "zig" and found.major == 22
    assert found.target.startswith(architecture()) and "6.18" not in found.target


# -- instruction sets -------------------------------------------------------------------------


def test_levels_follow_the_features() -> None:
    v4 = frozenset(V4) | {"avx512_bf16", "sse2", "ermsb"}
    best = isa_module.best("x86_64", v4)
    assert best.level == "avx512"
    assert set(best.features) == set(V4) | {"avx512_bf16"}
    assert isa_module.best("x86_64", v4 - {"avx512vl"}).level == "avx2"
    assert isa_module.best("x86_64", frozenset(V3) - {"fma"}).level == "portable"
    assert isa_module.best("x86_64", frozenset(V2)).features == tuple(sorted(V2))
    assert isa_module.best("x86_64", frozenset(V2) - {"popcnt"}).features == ()
    assert isa_module.best("aarch64", v4).level == "portable"


@pytest.mark.parametrize("compiler", [GCC, *OTHERS], ids=lambda c: c.kind)
def test_flags_are_explicit(compiler: Compiler) -> None:
    features = tuple(sorted((*V4, *EXTRA)))
    flags = compile_flags(Isa("avx512", "x86_64", features), compiler)
    text = " ".join(flags)
    assert "native" not in text and "-ffast-math" not in flags
    assert "-mprefer-vector-width=512" in flags and "-ffp-contract=fast" in flags
    assert "avx512bf16" in text and "fma" in text
    assert not any("/" in flag for flag in (*flags, *link_flags(compiler)))
    avx2 = " ".join(compile_flags(Isa("avx2", "x86_64", tuple(sorted(V3))), compiler))
    assert "avx512" not in avx2 and "avx2" in avx2
    assert "avx" not in " ".join(compile_flags(Isa("portable", "x86_64", ()), compiler))


def test_features_an_old_compiler_lacks_are_left_out() -> None:
    old = Compiler(("g++",), "gcc", "9.4.0", 9, "x86_64-linux-gnu")
    isa = Isa("avx512", "x86_64", (*V4, "avx512_bf16", "avx512_vnni"))
    assert "-mavx512bf16" not in compile_flags(isa, old)
    assert "-mavx512vnni" in compile_flags(isa, old)


# -- keys -------------------------------------------------------------------------------------


def test_a_header_is_part_of_the_key_however_deep(tmp_path: Path) -> None:
    (tmp_path / "prelude.h").write_text('#include "a.h"\n')
    (tmp_path / "a.h").write_text('#  include "sub/b.h"\n#include <math.h>\n')
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.h").write_text('#include "c.h"\n')
    (tmp_path / "sub" / "c.h").write_text("// one\n")
    roots = (tmp_path,)
    before = included({"prelude.h": None}, roots)
    assert [name.partition("/")[2] for name in sorted(before)] == [
        "a.h", "prelude.h", "sub/b.h", "sub/c.h",
    ]  # fmt: skip
    (tmp_path / "sub" / "c.h").write_text("// other\n")
    after = included({"prelude.h": None}, roots)
    assert [n for n in before if before[n] != after[n]] == [f"{tmp_path.name}/sub/c.h"]


def test_a_computed_include_is_refused() -> None:
    with pytest.raises(CompileError, match="literal name"):
        kernel_fields(Unit("k", "#include NAME\n"), Isa.detect(), GCC)


def test_forcing_another_isa_gives_another_key() -> None:
    keys = {kernel_fields(unit("k"), Isa.of(TARGET_OF[level]), GCC) for level in found_levels()}
    assert len(keys) == len(found_levels())


# -- the real compiler ------------------------------------------------------------------------


@pytest.mark.parametrize("level", found_levels())
def test_compile_link_and_call(level: str, real: Store, tmp_path: Path) -> None:
    compiler, isa = Compiler.discover(), Isa.of(TARGET_OF[level])
    seen: list[tuple[UnitResult, int, int]] = []
    units = [unit("first", 3.0), unit("second", 5.0), Unit("again", unit("first", 3.0).source)]
    report = compile_units(
        units, isa, compiler, real, jobs=2, progress=lambda *step: seen.append(step)
    )
    assert report.precompiled and report.notes == []
    assert [u.name for u in report.units] == ["first", "second", "again"]
    assert len(report.objects) == 2 and report.hits == 0
    assert seen[-1][1:] == (3, 3)
    library = link(report.objects, tmp_path / "kernels.so", compiler, real)
    assert library.origin == "made"

    loaded = ctypes.CDLL(str(tmp_path / "kernels.so"))
    x, y = (ctypes.c_float * 4)(1, 2, 3, 4), (ctypes.c_float * 4)()
    pointers = (ctypes.c_void_p * 2)(ctypes.addressof(x), ctypes.addressof(y))
    arguments = Arguments(pointers, None, None)
    loaded.second(ctypes.byref(arguments), ctypes.c_int64(1), ctypes.c_int64(4))
    assert list(y) == [0, 12, 18, 24]
    with pytest.raises(AttributeError):
        _ = loaded.bits_to_f32  # hidden

    again = compile_units(units, isa, compiler, real, require_cached=True)
    assert again.hits == 3
    second = link(again.objects, tmp_path / "copy.so", compiler, real)
    assert second.origin == "hit"
    assert (tmp_path / "copy.so").read_bytes() == (tmp_path / "kernels.so").read_bytes()
    assert real.check() == []


def test_objects_and_libraries_are_the_same_bytes_in_every_cache(
    real: Store, tmp_path: Path
) -> None:
    compiler, isa = Compiler.discover(), Isa.detect()
    digests = []
    for number, store in enumerate((real, Store(tmp_path / "cache"))):
        report = compile_units([unit("same", 1.25)], isa, compiler, store)
        library = link(report.objects, tmp_path / f"{number}.so", compiler, store)
        digests.append((report.objects[0].sha256, library.sha256, library.key))
    assert digests[0] == digests[1]


def test_a_rejected_unit_is_named_and_its_source_kept(real: Store) -> None:
    bad = Unit("my kernel", '#include "abi.h"\nint f() {\n  return undeclared;\n}\n')
    with pytest.raises(CompileError) as caught:
        compile_units([unit("good", 9.0), bad], Isa.detect(), Compiler.discover(), real)
    error = caught.value
    assert error.exit_code == 4
    assert "my kernel" in error.what and "undeclared" in error.what
    kept = Path(error.hint.rpartition(" ")[2])
    assert kept.read_text() == bad.source
    kept.unlink()
    assert list((real.root / "tmp").iterdir()) == []
    assert real.check() == []


def test_an_undefined_symbol_is_a_link_error_that_names_it(real: Store, tmp_path: Path) -> None:
    lost = Unit("lost", "extern void absent_symbol();\nvoid call() { absent_symbol(); }\n")
    compiler = Compiler.discover()
    report = compile_units([lost], Isa.detect(), compiler, real)
    with pytest.raises(CompileError, match="absent_symbol"):
        link(report.objects, tmp_path / "x.so", compiler, real)
    assert list(tmp_path.iterdir()) == []


def test_the_precompiled_header_is_dropped_with_a_note_when_it_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, real: Store
) -> None:
    store = Store(tmp_path / "cache")
    compiler, isa = Compiler.discover(), Isa.detect()
    if compiler.kind != "gcc":
        pytest.skip("the stub is g++'s")
    from graphc.toolchain import compile as compile_module

    def broken(*arguments: object) -> tuple[tuple[str, ...], None]:
        stub = tmp_path / "prelude.h"
        stub.write_text('#error "the precompiled header was not used"\n')
        stub.with_name("prelude.h.gch").write_bytes(b"gpch of another compiler")
        return ("-include", str(stub)), None

    monkeypatch.setattr(compile_module, "precompiled_prelude", broken)
    report = compile_units([unit("plain", 7.0)], isa, compiler, store)
    assert not report.precompiled
    assert len(report.notes) == 1 and "without the precompiled header" in report.notes[0]
    assert store.check() == []


def test_require_cached_names_what_differs(real: Store) -> None:
    compiler, isa = Compiler.discover(), Isa.detect()
    compile_units([unit("wanted", 11.0)], isa, compiler, real)
    with pytest.raises(CacheMissError) as caught:
        compile_units(
            [unit("wanted", 11.0)], Isa.of("portable"), compiler, real, require_cached=True
        )
    assert caught.value.exit_code == 9
    if isa.level != "portable":
        assert f"isa: {isa.level} -> portable" in caught.value.what


# -- interruption -----------------------------------------------------------------------------

INTERRUPTED = """
import signal, sys
# a runner in the background hands down an ignored SIGINT, which Python would keep
signal.signal(signal.SIGINT, signal.default_int_handler)
from pathlib import Path
from cache.store import Store
from graphc.lowering.context import Unit
from graphc.toolchain.compile import compile_units
from graphc.toolchain.compiler import Compiler
from graphc.toolchain.isa import Isa
try:
    compile_units([Unit("slow", "// slow")], Isa.detect(), Compiler.discover(), Store())
except KeyboardInterrupt:
    sys.exit(130)
"""


def leftovers(tmp_path: Path) -> list[Path]:
    return [*(tmp_path / "cache" / "tmp").iterdir(), *(tmp_path / "tmp").iterdir()]


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill-9"])
def test_an_interrupted_build_leaves_nothing_half_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sign: int
) -> None:
    pid, scratch = tmp_path / "pid", tmp_path / "tmp"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    body = '[ "$1" = -v ] && { echo "gcc version 12.0.0\nTarget: x"; exit 0; }\n'
    body += f"[ -f unit.cpp ] || exit 1\necho $$ > {pid}.new; mv {pid}.new {pid}\nsleep 600\n"
    environment = {
        **os.environ,
        "CXX": script(tmp_path / "slow", body),
        "GRAPHC_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": str(HOME),
        "TMPDIR": str(scratch),
    }
    process = subprocess.Popen([sys.executable, "-c", INTERRUPTED], env=environment)
    deadline = time.monotonic() + 30
    while not pid.exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(sign)
    status = process.wait(20)
    child = int(pid.read_text())
    if sign == signal.SIGINT:
        assert status == 130
        assert not Path(f"/proc/{child}").exists()
        assert leftovers(tmp_path) == []
    else:
        os.killpg(child, signal.SIGKILL)
    store = Store(tmp_path / "cache")
    assert store.check() == []
    assert list((tmp_path / "cache").glob("kernels-v2/*/*")) == []

    # the lock of a killed process is free, and what it left is swept a day later
    from cache.folder import sweep

    def make(path: Path) -> None:
        path.write_text("x")

    fields = (("kind", "test"),)
    with_lock = store.fetch_or_make("kernels-v2", fields, make, store.workspace(), label="t")
    assert with_lock.origin == "made"
    del with_lock
    assert sweep(store.root, older_than=0) >= (sign == signal.SIGKILL)
    assert leftovers(tmp_path) == []
