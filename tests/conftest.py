"""What all tests share: one thread, a kernel cache of their own, the repository's root."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

if TYPE_CHECKING:
    from tests.decoder_plans import Plans

ROOT = Path(__file__).resolve().parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--bless", action="store_true", help="accept what golden cases give now")


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One kernel cache for the whole run, empty at its start; never the user's own.

    Workers of pytest-xdist have folders of their own in that of the run, and share this one.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "kernel-cache"
    folder.mkdir(mode=0o700, exist_ok=True)
    before = os.environ.get("GRAPHC_CACHE_DIR")
    os.environ["GRAPHC_CACHE_DIR"] = str(folder)
    yield folder
    if before is None:
        del os.environ["GRAPHC_CACHE_DIR"]
    else:
        os.environ["GRAPHC_CACHE_DIR"] = before


@pytest.fixture(scope="session")
def decoder_plans(tmp_path_factory: pytest.TempPathFactory) -> Plans:
    """Plans of tiny decoders; a plan takes its time, so several files share them."""
    from tests.decoder_plans import Plans

    return Plans(tmp_path_factory.mktemp("decoders"))


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Every test draws the same numbers each time: a failure can be seen again."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)
