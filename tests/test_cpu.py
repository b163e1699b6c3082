"""What the CPU can do, narrowed by GRAPHC_CPU, and the targets that a build may name."""

from __future__ import annotations

import pytest

from graphc import cpu
from graphc.cpu import EXTRA, V2, V3, V4, lacking, narrowed, supported
from graphc.errors import UsageError
from graphc.toolchain.isa import Isa, targets

ALL = frozenset((*V4, *EXTRA, "sse2"))


def pretend(monkeypatch: pytest.MonkeyPatch, found: frozenset[str] | None, text: str = "") -> None:
    monkeypatch.setattr(cpu, "detected", lambda: found)
    monkeypatch.setattr("graphc.cpu.architecture", lambda name=None: name or "x86_64")
    monkeypatch.setattr("graphc.toolchain.isa.architecture", lambda: "x86_64")
    monkeypatch.setenv("GRAPHC_CPU", text)


def test_cpuinfo_is_read_and_its_absence_is_known(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = f"{tmp_path}/cpuinfo"
    with open(file, "w") as text:
        text.write("processor\t: 0\nflags\t\t: fpu avx avx2\n\nprocessor\t: 1\nflags\t\t: fpu\n")
    monkeypatch.setattr(cpu, "_CPUINFO", file)
    monkeypatch.setattr(cpu, "_saved", lambda: None)
    assert cpu.detected.__wrapped__() == {"fpu", "avx", "avx2"}
    monkeypatch.setattr(cpu, "_CPUINFO", f"{tmp_path}/absent")
    assert cpu.detected.__wrapped__() is None


def test_registers_that_the_system_does_not_save_are_not_used() -> None:
    assert supported(ALL, 0xE7) == ALL and supported(ALL, None) == ALL
    assert supported(ALL, 0x7) == {f for f in ALL if not f.startswith("avx512")}
    assert supported(ALL, 0x3) == {*V2, "sse2", "abm", "bmi1", "bmi2", "movbe"}


def test_narrowed() -> None:
    assert narrowed(ALL, "x86-64-v3") == set(V3)
    assert narrowed(ALL, "x86-64-v4, -avx512vl") == set(V4) - {"avx512vl"}
    assert narrowed(ALL, "host,-avx512_bf16,-avx2") == ALL - {"avx512_bf16", "avx2"}
    assert narrowed(ALL, "portable") == set()
    for wrong in ("", "avx2", "x86-64-v5", "host,avx2", "host,-sse9", "host,+avx2", "-avx2"):
        with pytest.raises(UsageError, match="expected a level and features to take away"):
            narrowed(ALL, wrong)
    with pytest.raises(UsageError, match="'x86-64-v4': it lacks avx512f"):
        narrowed(frozenset(V3), "x86-64-v4")


def test_a_subset_lacks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, ALL)
    assert lacking("x86_64", V3) == [] and lacking("x86_64", [*V4, *EXTRA]) == []
    assert lacking("riscv64", []) == ["riscv64"]
    pretend(monkeypatch, ALL, "x86-64-v3")
    assert lacking("x86_64", V3) == [] and lacking("x86_64", ()) == []
    assert lacking("x86_64", V4) == [f for f in V4 if f not in V3]
    pretend(monkeypatch, None)
    assert lacking("x86_64", ()) == [] and lacking("x86_64", V2) == list(V2)


def test_the_host_is_what_graphc_cpu_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, level, count in (
        ("", "avx512", len(V4) + len(EXTRA)),
        ("host,-avx512_bf16", "avx512", len(V4) + len(EXTRA) - 1),
        ("x86-64-v4", "avx512", len(V4)),
        ("x86-64-v4,-avx512cd", "avx2", len(V3)),
        ("x86-64-v3", "avx2", len(V3)),
        ("x86-64-v2", "portable", len(V2)),
        ("portable", "portable", 0),
    ):
        pretend(monkeypatch, ALL, text)
        found = Isa.detect()
        assert (found.level, len(found.features)) == (level, count), text


def test_targets_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, ALL)
    assert Isa.of("x86-64-v2").features == tuple(sorted(V2))
    assert Isa.of("portable").features == ()
    found = targets("x86-64-v3,portable, host,x86-64-v4,x86-64-v2,x86-64-v3")
    assert list(found) == ["host", "x86-64-v4", "x86-64-v3", "x86-64-v2", "portable"]
    pretend(monkeypatch, frozenset(V3))  # what this machine lacks can still be built for
    assert list(targets("host,x86-64-v3,x86-64-v4")) == ["x86-64-v4", "host"]
    for wrong in ("x86-64-v9", "avx2", "", "host,"):
        with pytest.raises(UsageError, match="out of host, x86-64-v4, x86-64-v3, x86-64-v2, port"):
            targets(wrong)
    monkeypatch.setattr("graphc.toolchain.isa.architecture", lambda: "aarch64")
    with pytest.raises(UsageError, match="out of host, portable, found 'x86-64-v3'"):
        targets("host,x86-64-v3")
