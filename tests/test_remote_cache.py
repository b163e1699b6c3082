"""The shared tier of the kernel cache: an S3 server on loopback, and a folder.

Most tests use the fake compiler of tests/test_cache.py: what matters is who compiles, and when.
"""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch

import graphc
from cache import remote
from cache.key import Key
from cache.remote_files import RemoteFiles
from cache.signed import Refused, decode, encode
from cache.store import Store
from cli.doctor import shared_cache
from graphc.frontends.resolve import resolve
from graphc.lowering.context import Unit
from graphc.store import KERNELS, LINKS
from graphc.toolchain import compiler as compiler_module
from graphc.toolchain.compile import CompileReport, compile_units
from graphc.toolchain.compiler import Compiler
from graphc.toolchain.isa import Isa
from graphc.toolchain.link import link

HOME = Path(__file__).resolve().parents[1]
SECRET = "of tests, and long enough"
VARIABLES = (remote.URL, remote.WRITE, remote.TRUST, remote.KEY, remote.KEY_FILE, remote.TIMEOUT)

#: poses as g++: an object is the source, a library its objects; the log has a line a compile
FAKE = """#!/bin/sh
[ "$1" = -v ] && { echo "gcc version 12.0.0"; echo "Target: x86_64-fake"; exit 0; }
while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done
if [ -f unit.cpp ]; then head -n 1 unit.cpp >> "$FAKE_LOG"; cp unit.cpp "$out"; exit 0; fi
if [ -f 0.o ]; then cat *.o > "$out"; else : > "$out"; fi
"""


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that takes milliseconds; the log of its compiles."""
    program, log = tmp_path / "fake-g++", tmp_path / "log"
    program.write_text(FAKE)
    program.chmod(0o755)
    log.touch()
    monkeypatch.setenv("CXX", str(program))
    monkeypatch.setenv("FAKE_LOG", str(log))
    return log


def serve() -> tuple[Any, str]:
    """An S3 server on loopback, and its URL; servers of one process have the same buckets."""
    from moto.server import ThreadedMotoServer  # a second of imports, for who runs these tests

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    return server, "http://{}:{}".format(*server.get_host_and_port())


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """An S3 server with an empty bucket named "shared"."""
    server, url = serve()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", url)
        patch.setenv("AWS_ACCESS_KEY_ID", "tester")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        fsspec.filesystem("s3", skip_instance_cache=True).mkdir("shared")
        yield url
    server.stop()


@pytest.fixture(params=["s3", "file"])
def tier(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A shared tier that this machine reads and writes, with signatures; its URL."""
    if request.param == "s3":
        request.getfixturevalue("server")
        url = f"s3://shared/{tmp_path.name}"
    else:
        (tmp_path / "folder").mkdir()
        url = f"file://{tmp_path / 'folder'}"
    monkeypatch.setenv(remote.URL, url)
    monkeypatch.setenv(remote.KEY, SECRET)
    monkeypatch.setenv(remote.WRITE, "1")
    return url


def build(cache: Path, *names: str, library: bool = False) -> CompileReport:
    store = Store(cache)
    units = [Unit(name, f"// {name}\nint {name};\n") for name in names]
    compiler = Compiler.discover()
    report = compile_units(units, Isa.of("portable"), compiler, store, jobs=2)
    if library:
        link(report.objects, cache / "library.so", compiler, store)
    report.notes.extend(store.drain_notes())
    return report


def objects(url: str) -> dict[str, bytes]:
    """Everything in the tier by name."""
    fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False)
    return {name.removeprefix(root).lstrip("/"): fs.cat_file(name) for name in fs.find(root)}


def put(url: str, name: str, data: bytes) -> None:
    fsspec.core.url_to_fs(url, skip_instance_cache=True)[0].pipe_file(f"{url}/{name}", data)


# -- hits -------------------------------------------------------------------------------------


def test_filled_by_one_and_hit_by_another(tier: str, tmp_path: Path, log: Path) -> None:
    first = build(tmp_path / "a", "one", "two", library=True)
    assert (first.compiled, first.notes) == (2, [])
    compiles = log.read_text()
    again = build(tmp_path / "b", "one", "two", library=True)
    assert (again.hits, again.remote_hits, again.compiled, again.notes) == (2, 2, 0, [])
    assert log.read_text() == compiles
    assert [o.path.read_bytes() for o in again.objects] == [
        o.path.read_bytes() for o in first.objects
    ]
    assert (tmp_path / "b" / "library.so").read_text() == "// one\nint one;\n// two\nint two;\n"
    # what came from there is in the cache now
    os.environ.pop(remote.URL)
    third = build(tmp_path / "b", "one", "two", library=True)
    assert (third.hits, third.remote_hits) == (2, 0)
    assert Store(tmp_path / "b").check() == []


NET = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.linear = torch.nn.Linear(24, 40)

    def forward(self, x):
        return torch.softmax(torch.nn.functional.silu(self.linear(x)), -1)


def make():
    return Net(), (torch.ones(3, 24),)
"""


def test_a_model_without_a_compiler(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine with an empty cache and no compiler builds out of the bucket alone; one that had
    built the model before had filled it."""
    (tmp_path / "net.py").write_text(NET)
    model, plan = f"{tmp_path / 'net.py'}:make", tmp_path / "plan"
    monkeypatch.setenv("GRAPHC_CACHE_DIR", str(tmp_path / "a"))
    assert graphc.build(model, plan, jobs=1).compile.hits == 0
    monkeypatch.setenv(remote.URL, "s3://shared/model")
    monkeypatch.setenv(remote.KEY, SECRET)
    with monkeypatch.context() as patch:
        patch.setenv(remote.WRITE, "1")
        assert graphc.build(model, plan, jobs=1).compile.compiled == 0
    assert [name.partition("/")[0] for name in objects("s3://shared/model")][-1] == LINKS
    shutil.rmtree(plan)
    monkeypatch.setenv("GRAPHC_CACHE_DIR", str(tmp_path / "b"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(compiler_module, "_zig_command", lambda: None)
    report = graphc.build(model, plan, jobs=1)
    assert report.compile.hits == report.compile.remote_hits == report.compile.units > 1
    x = torch.randn(3, 24)
    with torch.no_grad():
        expected = resolve(model).module(x).numpy()
    found = graphc.load(plan).run(x.numpy())
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_write_back_is_off_unless_asked_for(
    tier: str, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in ("", "0"):
        monkeypatch.setenv(remote.WRITE, value)
        assert build(tmp_path / f"cache{value}", "one", library=True).notes == []
    assert objects(tier) == {}


def test_what_a_writer_has_already_is_stored_too(
    tier: str, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine with a warm cache fills a tier that is new; what is there is left as it is."""
    with monkeypatch.context() as patch:
        patch.delenv(remote.URL)
        build(tmp_path / "a", "one", "two", library=True)
    assert build(tmp_path / "a", "one", library=False).hits == 1
    first = objects(tier)
    assert len(first) == 1 and b'"label":"one"' in next(iter(first.values()))
    assert build(tmp_path / "a", "one", "two", library=True).hits == 2
    assert {name: data for name, data in objects(tier).items() if name in first} == first
    assert build(tmp_path / "b", "one", "two", library=True).remote_hits == 2


def test_doctor_says_whether_the_tier_is_used(
    tier: str, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path / "a", "one", library=True)
    (found,) = shared_cache()
    assert found.state == "ok" and tier in found.text and "of 1 compilers" in found.text
    monkeypatch.setenv(remote.KEY, "short")
    (found,) = shared_cache()
    assert found.state == "note" and "at least 16 bytes" in found.text
    monkeypatch.delenv(remote.URL)
    assert shared_cache() == []


def test_two_writers_at_once(tier: str, tmp_path: Path, log: Path) -> None:
    """Two machines make the same kernels: each object is whole, whoever was last."""
    names = [f"k{number}" for number in range(6)]
    reports: list[CompileReport] = []

    def work(cache: str) -> None:
        reports.append(build(tmp_path / cache, *names))

    threads = [threading.Thread(target=work, args=(cache,)) for cache in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [report.notes for report in reports] == [[], []]
    found = objects(tier)
    assert len(found) == len(names)
    for name, data in found.items():
        decode(data, KERNELS, name[-64:], SECRET.encode())
    assert build(tmp_path / "c", *names).remote_hits == len(names)


def test_a_rebuilt_cache_with_a_compiler_of_its_own_is_not_confused(
    tier: str, tmp_path: Path, log: Path
) -> None:
    """What the tier knows of compilers is one object each."""
    build(tmp_path / "a", "one", library=True)
    build(tmp_path / "a", "two", library=True)
    told = [name for name in objects(tier) if name.startswith(remote.COMPILERS)]
    assert len(told) == 1
    assert remote.Remote().makers() == [("gcc 12.0.0", "x86_64-fake")]


# -- what is refused --------------------------------------------------------------------------


def resigned(data: bytes, secret: bytes | None, **changes: Any) -> bytes:
    """The same entry with another key, payload or signature."""
    first, second = data.split(b"\n", 2)[:2]
    import msgspec

    manifest = msgspec.json.decode(second)
    begin = len(data) - manifest["size"]
    key = Key.parse(data[begin - manifest["key_size"] : begin].decode())
    payload = changes.get("payload", data[begin:])
    bucket = changes.get("bucket", manifest["bucket"])
    return encode(bucket, changes.get("key", key), payload, "x", 1.0, secret)


TAMPERING: dict[str, Callable[[bytes], bytes]] = {
    "payload": lambda data: data[:-2] + bytes([data[-2] ^ 1]) + data[-1:],
    "manifest": lambda data: data.replace(b'"label":"', b'"label":"x'),
    "signature": lambda data: data.replace(b"hmac-sha256 ", b"hmac-sha256 0", 1),
    "unsigned": lambda data: resigned(data, None),
    "another secret": lambda data: resigned(data, b"of somebody else, as long"),
    "another bucket": lambda data: resigned(data, SECRET.encode(), bucket=LINKS),
    "another key": lambda data: resigned(data, SECRET.encode(), key=Key((("a", "b"),))),
    "cut": lambda data: data[: len(data) // 2],
    "header only": lambda data: data[:30],
    "empty": lambda data: b"",
    "text": lambda data: b"<html>\n<body>\n</html>\n",
}


def test_what_was_tampered_with_is_refused_and_made_anew(
    tier: str, tmp_path: Path, log: Path
) -> None:
    hows = ("payload", "unsigned", "empty") if tier.startswith("s3") else tuple(TAMPERING)
    ways = {how.replace(" ", "_"): TAMPERING[how] for how in hows}
    first = build(tmp_path / "a", *ways)
    good = objects(tier)
    names = {unit.name: remote.place(KERNELS, unit.key) for unit in first.units}
    bad = {name: ways[way](good[name]) for way, name in names.items()}
    for name, data in bad.items():
        assert data != good[name]
        put(tier, name, data)
    report = build(tmp_path / "b", *ways)
    assert (report.compiled, report.remote_hits) == (len(ways), 0)
    assert len(report.notes) == 1
    assert "refused" in report.notes[0] and f"{len(ways) - 1} more" in report.notes[0]
    for mine, theirs in zip(report.objects, first.objects, strict=True):
        assert mine.path.read_bytes() == theirs.path.read_bytes()
    now = objects(tier)
    assert all(now[name] != data for name, data in bad.items())  # write-back heals them
    assert build(tmp_path / "c", *ways).remote_hits == len(ways)


@pytest.mark.parametrize("how", TAMPERING)
def test_each_way_of_tampering_is_refused(how: str) -> None:
    key = Key((("kind", "kernel"), ("source", "int x;")))
    good = encode(KERNELS, key, b"payload", "one", 1.5, SECRET.encode())
    assert decode(good, KERNELS, key.digest, SECRET.encode()).payload == b"payload"
    with pytest.raises(Refused):
        decode(TAMPERING[how](good), KERNELS, key.digest, SECRET.encode())


def test_another_entry_under_this_name_is_refused(tier: str, tmp_path: Path, log: Path) -> None:
    """Rightly signed, but for another key: a replay."""
    build(tmp_path / "a", "one", "two")
    first, second = sorted(objects(tier).items())
    put(tier, first[0], second[1])
    put(tier, second[0], first[1])
    report = build(tmp_path / "b", "one", "two")
    assert (report.compiled, report.remote_hits) == (2, 0)
    assert (
        len(report.notes) == 1 and "belongs to" in report.notes[0] and "1 more" in report.notes[0]
    )


def test_without_a_key_a_bucket_must_be_declared_trusted(
    server: str, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(remote.URL, f"s3://shared/{tmp_path.name}")
    monkeypatch.setenv(remote.WRITE, "1")
    report = build(tmp_path / "a", "one")
    assert report.compiled == 1 and len(report.notes) == 1
    assert remote.KEY_FILE in report.notes[0] and remote.TRUST in report.notes[0]
    assert objects(os.environ[remote.URL]) == {}
    monkeypatch.setenv(remote.TRUST, "1")
    assert build(tmp_path / "b", "one").notes == []
    assert build(tmp_path / "c", "one").remote_hits == 1
    # who asks for signatures takes nothing of what was written without
    monkeypatch.setenv(remote.KEY, SECRET)
    monkeypatch.delenv(remote.WRITE)
    report = build(tmp_path / "d", "one")
    assert report.compiled == 1 and "not signed" in report.notes[0]


def test_a_folder_that_only_its_user_writes_needs_no_key(
    tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "folder"
    shared.mkdir(0o700)
    monkeypatch.setenv(remote.URL, f"file://{shared}")
    monkeypatch.setenv(remote.WRITE, "1")
    old = os.umask(0o022)
    try:
        assert build(tmp_path / "a", "one").notes == []
    finally:
        os.umask(old)
    assert build(tmp_path / "b", "one").remote_hits == 1
    inner = next(shared.glob(f"{KERNELS}/*"))
    inner.chmod(0o777)
    report = build(tmp_path / "c", "one")
    assert report.compiled == 1 and "is writable by everyone" in report.notes[0]
    shared.chmod(0o770)
    report = build(tmp_path / "d", "one")
    assert report.compiled == 1 and "(mode 0770)" in report.notes[0]


SETTINGS: dict[str, tuple[dict[str, str], str]] = {
    "no scheme": ({remote.URL: "shared/folder"}, "expected a URL such as s3://"),
    "chained": ({remote.URL: "simplecache::s3://b/p"}, "expected a URL"),
    "unknown": ({remote.URL: "gopher://host/p", remote.KEY: SECRET}, "gopher"),
    "no folder": ({remote.URL: "file:///nonexistent/x", remote.KEY: SECRET}, "no such folder"),
    "short key": ({remote.KEY: "short"}, "at least 16 bytes, found 5"),
    "two keys": ({remote.KEY: SECRET, remote.KEY_FILE: "/x"}, "found both"),
    "no key file": ({remote.KEY_FILE: "/nonexistent"}, "cannot be read"),
    "timeout": ({remote.TIMEOUT: "soon"}, "expected seconds"),
}


@pytest.mark.parametrize("what", SETTINGS)
def test_a_bad_setting_is_a_note_and_no_error(
    what: str, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, told = SETTINGS[what]
    monkeypatch.setenv(remote.URL, "memory://cache")
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    report = build(tmp_path / "a", "one", "two", library=True)
    assert report.compiled == 2
    assert len(report.notes) == 1 and told in report.notes[0], report.notes


def test_a_key_file(tier: str, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_text(SECRET + "\n")
    file.chmod(0o600)
    build(tmp_path / "a", "one")
    monkeypatch.delenv(remote.KEY)
    monkeypatch.setenv(remote.KEY_FILE, str(file))
    assert build(tmp_path / "b", "one").remote_hits == 1
    file.chmod(0o666)
    report = build(tmp_path / "c", "one")
    assert report.compiled == 1 and "chmod 600" in report.notes[0]


# -- a tier that fails ------------------------------------------------------------------------


def test_a_dead_port_costs_little(
    tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    for name, value in {remote.URL: "s3://b/p", remote.KEY: SECRET, remote.WRITE: "1"}.items():
        monkeypatch.setenv(name, value)
    started = time.monotonic()
    report = build(tmp_path / "a", *(f"k{number}" for number in range(20)), library=True)
    assert report.compiled == 20
    assert len(report.notes) == 1 and "left alone" in report.notes[0]
    assert time.monotonic() - started < 20


def test_a_server_that_never_answers(
    tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
        monkeypatch.setenv(remote.URL, "s3://b/p")
        monkeypatch.setenv(remote.KEY, SECRET)
        monkeypatch.setenv(remote.TIMEOUT, "1")
        started = time.monotonic()
        report = build(tmp_path / "a", *(f"k{number}" for number in range(20)))
    assert report.compiled == 20
    assert len(report.notes) == 1 and "left alone" in report.notes[0]
    assert time.monotonic() - started < 15


def test_a_slow_tier_is_left_alone_in_the_end(
    tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each access is within its time, all together are not within that of a build."""
    kind = fsspec.get_filesystem_class("memory")
    calls: list[str] = []

    def slow(self: object, path: str, **options: object) -> bytes:
        calls.append(path)
        time.sleep(0.15)
        raise FileNotFoundError(path)

    monkeypatch.setattr(kind, "cat_file", slow)
    monkeypatch.setattr(remote, "LANES", 2)
    monkeypatch.setattr(remote, "_CALLS", 1)
    for name, value in {remote.URL: "memory://slow", remote.TIMEOUT: "2"}.items():
        monkeypatch.setenv(name, value)
    report = build(tmp_path / "a", *(f"k{number}" for number in range(60)))
    assert report.compiled == 60
    assert len(report.notes) == 1 and "2 s of waiting" in report.notes[0]
    assert len(calls) < 60


def test_a_server_that_stops_during_a_build(
    tier: str, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"k{number}" for number in range(10)]
    build(tmp_path / "a", *names)
    second, url = serve()
    monkeypatch.setattr(remote, "LANES", 2)
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    read, calls = RemoteFiles.read, list[str]()

    def stops(self: RemoteFiles, name: str) -> bytes | None:
        calls.append(name)
        if len(calls) == 5:
            second.stop()
            if not tier.startswith("s3"):
                shutil.rmtree(tmp_path / "folder")
                (tmp_path / "folder").write_text("no folder any more")
        return read(self, name)

    monkeypatch.setattr(RemoteFiles, "read", stops)
    report = build(tmp_path / "b", *names)
    assert report.hits + report.compiled == 10 and 0 < report.remote_hits < 10
    assert len(report.notes) == 1 and "left alone" in report.notes[0]
    assert len(calls) < len(names) + remote.LANES
    assert [o.path.read_text().split()[1] for o in report.objects] == names


def test_a_bucket_that_is_not_there(
    server: str, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(remote.URL, "s3://no-such-bucket/x")
    monkeypatch.setenv(remote.KEY, SECRET)
    report = build(tmp_path / "a", "one")
    assert report.compiled == 1 and "bucket does not exist" in report.notes[0]


def test_credentials_that_are_missing(
    server: str, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv(remote.URL, "s3://shared/none")
    monkeypatch.setenv(remote.KEY, SECRET)
    report = build(tmp_path / "a", "one")
    assert report.compiled == 1
    assert len(report.notes) == 1 and "redentials" in report.notes[0]


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder_with_write_back(
    tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "folder"
    shared.mkdir(0o500)
    monkeypatch.setenv(remote.URL, f"file://{shared}")
    monkeypatch.setenv(remote.WRITE, "1")
    report = build(tmp_path / "a", "one", "two")
    assert report.compiled == 2 and "cannot be written from here" in report.notes[0]


def test_a_tier_that_refuses_writing(
    tier: str, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Credentials that may only read, or a folder mounted read-only."""
    build(tmp_path / "a", "one")

    def denied(*arguments: object, **options: object) -> None:
        raise PermissionError("Access Denied")

    opened = remote.RemoteFiles

    def read_only(url: str, seconds: float) -> RemoteFiles:
        files = opened(url, seconds)
        monkeypatch.setattr(files._fs, "pipe_file", denied)
        return files

    monkeypatch.setattr(remote, "RemoteFiles", read_only)
    report = build(tmp_path / "b", "one", "two", "three")
    assert (report.remote_hits, report.compiled) == (1, 2)
    assert len(report.notes) == 1 and "cannot be written from here" in report.notes[0]
    assert "PermissionError" in report.notes[0]
    assert len(objects(tier)) == 1
    used = remote.Remote()  # what was denied once is not tried again, and reading goes on
    one, two = report.units[:2]
    used.offer(KERNELS, Key((("a", "b"),)), log, "x", 1.0, replace=True)
    assert not used.writes
    assert used.fetch(KERNELS, one.key) is not None and used.fetch(KERNELS, two.key) is None
    assert len(used.drain_notes()) == 1


def test_without_s3fs(
    server: str, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    known = importlib.import_module("fsspec.registry")._registry
    monkeypatch.delitem(known, "s3", raising=False)
    monkeypatch.setenv(remote.URL, "s3://shared/x")
    monkeypatch.setenv(remote.KEY, SECRET)
    report = build(tmp_path / "a", "one")
    assert report.compiled == 1 and 'pip install "graphc[remote]"' in report.notes[0]


# -- what it costs when it is not used --------------------------------------------------------


def test_fsspec_is_not_imported_without_the_variable(tmp_path: Path, log: Path) -> None:
    script = (
        "import sys; from tests_remote import build; from pathlib import Path\n"
        "build(Path(sys.argv[1]), 'one')\n"
        "print([m for m in ('fsspec', 's3fs', 'cache.remote') if m in sys.modules])\n"
    )
    (tmp_path / "tests_remote.py").write_text(
        "from cache.store import Store\n"
        "from graphc.toolchain.compile import compile_units\n"
        "from graphc.toolchain.compiler import Compiler\n"
        "from graphc.toolchain.isa import Isa\n"
        "from types import SimpleNamespace\n"
        "def build(cache, name):\n"
        "    unit = SimpleNamespace(name=name, source='int x;')\n"
        "    compile_units([unit], Isa.detect(), Compiler.discover(), Store(cache))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(HOME)])}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "cache")],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout == "[]\n", done.stderr


def test_a_password_in_the_url_is_not_shown() -> None:
    assert remote.shown("https://me:secret@host/path") == "https://...@host/path"
    assert remote.shown("s3://bucket/a@b") == "s3://bucket/a@b"


def test_an_entry_is_what_it_was() -> None:
    key = Key((("kind", "kernel"), ("source", "int x;\n\n")))
    for payload in (b"", b"\n\n", bytes(range(256))):
        data = encode(KERNELS, key, payload, "a\nlabel", 0.25, b"secret")
        found = decode(data, KERNELS, key.digest, b"secret")
        assert (found.key, found.payload, found.label, found.seconds) == (
            key,
            payload,
            "a\nlabel",
            0.25,
        )
        with pytest.raises(Refused):
            decode(data + b"x", KERNELS, key.digest, b"secret")


def test_every_flipped_bit_is_refused() -> None:
    key = Key((("kind", "kernel"), ("source", "int x;")))
    data = encode(KERNELS, key, b"payload", "label", 0.25, b"secret")
    for at in range(len(data)):
        for bit in (0, 5):
            bad = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
            with pytest.raises(Refused):
                decode(bad, KERNELS, key.digest, b"secret")
