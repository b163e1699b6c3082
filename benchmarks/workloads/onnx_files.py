"""Real models as ONNX files, in the folder that $MODELS names: text detection and recognition of
PP-OCR, and the voice activity detector of silero."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.workloads import Workload

#: name -> file, and shapes of the inputs
FILES: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {
    "det": ("ppocr-v4-det.onnx", {"x": (1, 3, 640, 640)}),
    "rec": ("ppocr-v4-rec.onnx", {"x": (1, 3, 48, 320)}),
    "vad": (
        "silero-vad-openvino.onnx",
        {"input": (1, 576), "state": (2, 1, 128)},
    ),
}


def make(name: str, folder: Path, random: np.random.Generator) -> Workload:
    """Pages of made-up writing, and noise as sound.

    Raises:
        FileNotFoundError: the folder has no such file.
    """
    file, shapes = FILES[name]
    path = (folder / file).absolute()
    if not path.is_file():
        raise FileNotFoundError(f"{file} is not in {folder} (MODELS=folder)")

    inputs = {
        key: page(shape, random)
        if len(shape) == 4
        else random.standard_normal(shape, dtype=np.float32)
        for key, shape in shapes.items()
    }
    return Workload(inputs, onnx=str(path))


def page(shape: tuple[int, ...], random: np.random.Generator) -> NDArray[np.float32]:
    """Lines of strokes on white paper, in [-1, 1]: on noise a detector finds nothing, and its
    results are the far tails of a sigmoid, whose relative error is that of a few pixels."""
    _, _, height, width = shape
    paper = np.ones((height, width), np.float32)
    for top in range(8, height - 24, 40):
        for left in range(8, width - 8, 5):
            if random.random() < 0.7:  # else a gap
                from_, to = np.sort(random.integers(0, 32, 2))
                paper[top + from_ : top + to, left : left + int(random.integers(1, 5))] = -1.0
    return np.broadcast_to(paper, shape).copy()
