"""shapes.yaml: the shipped file, errors with line and column, choice of buckets."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphc.errors import UsageError
from graphc.shapes import UNBOUNDED, Bucket, Shapes

ROOT = Path(__file__).resolve().parents[1]


def write(folder: Path, text: str) -> Path:
    path = folder / "shapes.yaml"
    path.write_text(text)
    return path


GOOD = """\
version: 1
symbols:
  T: {min: 1, max: 1000, default: 10}
buckets:
  small: {T: 100}
  large: {T: 1000}
defaults: {phase: prefill, buckets: [small], max: 64, default: 7}
models:
  - match: "net*"
    phases:
      prefill: {buckets: [small, large]}
      decode: {buckets: [small], symbols: {T: {min: 1, max: 1}}}
"""


def test_packaged_file_is_the_one_at_the_root() -> None:
    assert (ROOT / "graphc/shapes.yaml").read_bytes() == (ROOT / "shapes.yaml").read_bytes()


def test_default_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    packaged = Shapes.load()
    assert packaged.path.parent.name == "graphc"
    assert set(packaged.buckets) == {"2K", "32K", "128K"}
    write(tmp_path, GOOD)
    assert set(Shapes.load().buckets) == {"small", "large"}


def test_buckets_ascend_and_take_captured_ranges(tmp_path: Path) -> None:
    shapes = Shapes.load(write(tmp_path, GOOD))
    graph = {"T": (1, 500), "B": (1, 8), "X": (3, UNBOUNDED)}
    assert shapes.buckets_for("net1", None, graph) == [
        Bucket("small", {"T": 100, "B": 8, "X": 64}),
        Bucket("large", {"T": 500, "B": 8, "X": 64}),
    ]
    assert shapes.buckets_for("other", None, graph) == [
        Bucket("small", {"T": 100, "B": 8, "X": 64})
    ]


def test_equal_buckets_are_one(tmp_path: Path) -> None:
    shapes = Shapes.load(write(tmp_path, GOOD))
    assert shapes.buckets_for("net", None, {"T": (1, 50)}) == [Bucket("small", {"T": 50})]
    assert shapes.buckets_for("net", None, {}) == [Bucket("small", {})]


def test_phase_narrows_a_symbol(tmp_path: Path) -> None:
    shapes = Shapes.load(write(tmp_path, GOOD))
    assert shapes.buckets_for("net", "decode", {"T": (1, 50)}) == [Bucket("small", {"T": 1})]
    with pytest.raises(UsageError, match="expected a phase of net, found 'train'"):
        shapes.buckets_for("net", "train", {})


@pytest.mark.parametrize(
    ("only", "limits"),
    [
        (["large"], [{"T": 900, "B": 4}]),
        (["64"], [{"T": 64, "B": 4}]),
        (["T=70,B=2"], [{"T": 70, "B": 2}]),
        (["large", "small"], [{"T": 100, "B": 4}, {"T": 900, "B": 4}]),
    ],
)
def test_buckets_by_name_or_number(
    tmp_path: Path, only: list[str], limits: list[dict[str, int]]
) -> None:
    shapes = Shapes.load(write(tmp_path, GOOD))
    made = shapes.buckets_for("other", None, {"T": (1, 900), "B": (1, 4)}, only)
    assert [bucket.limits for bucket in made] == limits


@pytest.mark.parametrize("only", ["huge", "Q=5", "T=", "T=x", "-3"])
def test_unknown_bucket_is_refused(tmp_path: Path, only: str) -> None:
    shapes = Shapes.load(write(tmp_path, GOOD))
    with pytest.raises(UsageError, match="expected a"):
        shapes.buckets_for("net", None, {"T": (1, 9)}, [only])


def test_no_bucket_holds_the_minimum(tmp_path: Path) -> None:
    shapes = Shapes.load(write(tmp_path, GOOD))
    with pytest.raises(UsageError, match=r"holds T in \[5000, 9000\]"):
        shapes.buckets_for("net", None, {"T": (5000, 9000)})


def test_default_lengths_stay_in_range(tmp_path: Path) -> None:
    shapes = Shapes.load(write(tmp_path, GOOD))
    assert shapes.default_of("T", 1, 100) == 10
    assert shapes.default_of("T", 20, 100) == 20
    assert shapes.default_of("Y", 1, 100) == 7
    assert shapes.default_of("Y", 1, 3) == 3


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("max: 1000,", "max: many,", "3:20: a maximum of at least 1, found 'many'"),
        ("min: 1, max: 1000", "min: 5, max: 2", "3:20: a maximum of at least 5, found '2'"),
        ("T: 100}", "T: 0}", "5:14: an upper limit, found '0'"),
        ("[small, large]", "[small, big]", "11:34: one of the buckets small, large, found 'big'"),
        ("buckets: [small, large]", "buckets: small", "11:26: a sequence, found 'small'"),
        ("  large: {T: 1000}", "  small: {T: 1000}", "6:3: each name once, found 'small'"),
        ("match:", "mtach:", "9:5: one of match, phases, found 'mtach'"),
        ("version: 1", "version: 2", "1:10: 1, the version of this format, found '2'"),
        ("{T: 100}", "{T: 100", "6:8: YAML, found: "),
        ("{T: 100}", "", "5:9: a mapping, found nothing"),
        ("default: 10", "default: 2000", r"3:35: a length in [1, 1000], found '2000'"),
        ("max: 64, ", "", "7:11: a mapping with 'max', found a mapping"),
    ],
)  # fmt: skip
def test_malformed_file_names_line_and_column(
    tmp_path: Path, old: str, new: str, error: str
) -> None:
    place, _, text = error.partition(": ")
    assert old in GOOD
    with pytest.raises(UsageError) as caught:
        Shapes.load(write(tmp_path, GOOD.replace(old, new, 1)))
    assert caught.value.what.startswith(f"shapes.yaml:{place}: expected {text}")


@pytest.mark.parametrize("text", ["", "- 1\n", "\tx: 1\n", "a: *b\n"])
def test_no_mapping_at_the_top(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match=r"^shapes\.yaml"):
        Shapes.load(write(tmp_path, text))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        Shapes.load(tmp_path / "none.yaml")
