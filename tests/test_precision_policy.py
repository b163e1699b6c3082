"""The policy of mixed precision: as text, as a section of shapes.yaml, and its errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphc.api import Options, build, precision_policy
from graphc.errors import PrecisionError, UsageError
from graphc.precision import BUILT_IN, DEFAULT, ROLES, Precision
from graphc.shapes import Shapes

FILE = """\
version: 1
defaults: {phase: prefill, buckets: [], max: 64, default: 7}
precision:
  index: keep
  projections: [int8, int4]
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "shapes.yaml"
    path.write_text(text.replace("buckets: []", "buckets: [b]") + "\nbuckets: {b: {T: 9}}\n")
    return path


def test_the_default_narrows_what_ranks_and_what_is_stored() -> None:
    assert {role: str(DEFAULT[role]) for role in ROLES} == {
        "index": "mxfp8", "cache": "fp8", "projections": "keep", "attention": "keep",
        "residual": "keep", "router": "keep", "state": "keep",
    }  # fmt: skip
    packaged = Shapes.load(Path(__file__).resolve().parents[1] / "graphc/shapes.yaml").precision
    assert str(packaged) == str(DEFAULT)
    assert DEFAULT["index"].origin == BUILT_IN
    assert packaged["index"].origin.startswith("shapes.yaml:")


@pytest.mark.parametrize(
    ("policy", "found", "takes"),
    [
        ("cache=fp8", "fp8_pow2", True),
        ("cache=fp8_pow2", "fp8", False),
        ("cache=fp8", "mxfp8_ceil", False),
        ("cache=mxfp8", "mxfp8_even", True),
        ("cache=mxfp8", "e4m3", True),
        ("cache=fp8", "e4m3", True),
        ("cache=fp8_e5m2", "e4m3", False),
        ("cache=fp8", "fp8_e5m2", True),
        ("cache=mxfp8", "e8m0", True),
        ("cache=int8", "int4", False),
        ("cache=int4", "int4_g32", True),
        ("cache=keep", "fp8", False),
    ],
)
def test_formats_stand_for_their_variants(policy: str, found: str, takes: bool) -> None:
    assert Precision.parse(policy)["cache"].takes(found) == takes


def test_words_lie_over_the_file_and_the_file_over_the_default(tmp_path: Path) -> None:
    table = Shapes.load(write(tmp_path, FILE))
    policy = precision_policy(table, Options(precision="cache=keep, projections=int8+mxfp4"))
    assert str(policy["index"]) == "keep"
    assert policy["index"].origin == "shapes.yaml:4:10"
    assert policy["projections"].formats == ("int8", "mxfp4")
    assert policy["cache"].origin == "--precision"
    assert policy["router"].origin == BUILT_IN
    assert Shapes.load(write(tmp_path, FILE.split("precision")[0])).precision == DEFAULT


def test_an_option_that_narrows_opens_its_role() -> None:
    opened = DEFAULT.opened("projections", ["int8"], "--quant weights=int8")
    assert opened["projections"].takes("int8")
    assert opened["projections"].origin == "--quant weights=int8"
    assert DEFAULT.opened("cache", ["fp8_pow2"], "--quant kv=fp8") is DEFAULT
    wider = opened.opened("projections", ["int8", "int4_g32"], "x")
    assert wider["projections"].formats == ("int8", "int4_g32")


def test_what_is_asked_for_opens_its_role_unless_the_policy_says_keep(tmp_path: Path) -> None:
    table = Shapes.load(write(tmp_path, FILE))
    asked = ("index=mxfp8", "kv=fp8", "weights=mxfp4")
    policy = precision_policy(table, Options(quant=asked))
    assert policy["index"].formats == ("mxfp8_ceil",)
    assert policy["index"].origin == "quantize_index{form=mxfp8_ceil}"
    assert policy["cache"].formats == ("fp8",)
    assert policy["cache"].origin == BUILT_IN
    assert policy["projections"].formats == ("int8", "int4", "mxfp4")
    by_pass = precision_policy(table, Options(pass_options=["quantize_weights{form=mxfp4}"]))
    assert by_pass["projections"] == policy["projections"]
    policy = precision_policy(table, Options(quant=asked, precision="projections=keep"))
    assert str(policy["projections"]) == "keep"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("index", "expected role=format in 'index', found 'index'"),
        ("indx=mxfp8", "expected a role, found 'indx'.*did you mean index"),
        ("index=mxpf8", "expected a format for index, found 'mxpf8'.*did you mean mxfp8"),
        ("index=", "expected a format for index, found ''"),
        ("index=keep+fp8", "expected keep alone for index"),
        ("index=fp8,index=keep", "expected each role once, found 'index' again"),
    ],
)
def test_bad_words(text: str, message: str) -> None:
    with pytest.raises(UsageError, match="(?s)" + message) as caught:
        Precision.parse(text)
    assert caught.value.where == "--precision"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("precision: fp8", "shapes.yaml:3:12: expected a mapping, found 'fp8'"),
        ("precision:\n  indx: fp8", "shapes.yaml:4:3: expected one of index, cache.*found 'indx'"),
        ("precision:\n  index: fp9", "shapes.yaml:4:10: expected keep or one of .*found 'fp9'"),
        ("precision:\n  index: [int8, fp9]", "shapes.yaml:4:17: expected keep or one of .*'fp9'"),
        ("precision:\n  index: []", "shapes.yaml:4:10: expected keep, or formats"),
        ("precision:\n  index: [keep, fp8]", "shapes.yaml:4:10: expected keep, or formats"),
        ("precision:\n  index:", "shapes.yaml:4:9: expected keep or a format for index"),
        ("precision:\n  index: fp8\n  index: fp8", "shapes.yaml:5:3: expected each name once"),
    ],
)
def test_bad_files(tmp_path: Path, section: str, message: str) -> None:
    path = write(tmp_path, FILE.split("precision")[0] + section)
    with pytest.raises(UsageError, match=message):
        Shapes.load(path)


NET = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one = torch.nn.Linear(8, 8)
    def forward(self, x):
        return self.one(x.to(torch.float8_e4m3fn).to(x.dtype))
def net():
    return Net().eval(), (torch.ones(2, 8),)
"""


def test_a_build_is_refused_with_the_line_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    with pytest.raises(PrecisionError, match=r"projections kept as it is") as caught:
        build("net.py:net", tmp_path / "plan")
    assert "net.py:8" in caught.value.where
    assert caught.value.exit_code == 10
    assert not (tmp_path / "plan").exists()
    build("net.py:net", tmp_path / "plan", precision="projections=fp8")
    with pytest.raises(UsageError, match="expected a role, found 'projection'"):
        build("missing.py:net", tmp_path / "plan", precision="projection=fp8")
