"""What keeps a build cheap must not change what it makes: the collector and equal contents."""

from __future__ import annotations

import gc
from pathlib import Path

from graphc.distinct import Distinct
from graphc.garbage import rarely_collected
from graphc.plan_writer import WeightsWriter


def test_the_collector_is_as_before_after_the_last_build() -> None:
    before = gc.get_threshold()
    with rarely_collected():
        assert gc.get_threshold()[0] > before[0]
        with rarely_collected():
            pass
        assert gc.get_threshold()[0] > before[0]
    assert gc.get_threshold() == before


def test_a_collector_that_is_off_stays_off() -> None:
    before = gc.get_threshold()
    try:
        gc.set_threshold(0)
        with rarely_collected():
            assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)


def test_contents_that_differ_between_the_samples_are_different() -> None:
    data = bytes(3 << 20)
    other = bytearray(data)
    other[1 << 20] = 1
    found: Distinct[str] = Distinct()
    found.note(memoryview(data), "zeros")
    assert found.find(memoryview(bytes(data))) == "zeros"
    assert found.find(memoryview(other)) is None
    assert found.find(memoryview(data), kind="float32") is None


def test_more_weights_than_one_write_takes(tmp_path: Path) -> None:
    writer = WeightsWriter()
    contents = [k.to_bytes(2, "little") * 3 for k in range(1500)]
    for content in contents:
        writer.add("w", "uint8", [6], content)
    writer.write(tmp_path / "w")
    data = (tmp_path / "w").read_bytes()
    assert [data[w.offset : w.offset + w.nbytes] for w in writer.weights] == contents
