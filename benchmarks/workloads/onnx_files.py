"""Real models as ONNX files, in the folder that $MODELS names: text detection and recognition of
PP-OCR, and the voice activity detector of silero."""

from __future__ import annotations

from pathlib import Path

import numpy as np

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
    """Random pictures and sound.

    Raises:
        FileNotFoundError: the folder has no such file.
    """
    file, shapes = FILES[name]
    path = (folder / file).absolute()
    if not path.is_file():
        raise FileNotFoundError(f"{file} is not in {folder} (MODELS=folder)")

    inputs = {key: random.standard_normal(shape, dtype=np.float32) for key, shape in shapes.items()}
    return Workload(inputs, onnx=str(path))
