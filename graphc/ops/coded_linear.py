"""bf16 weights in 12 bits each, exactly, and the product with them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from graphc.ops.library import define

PANEL = 32  # rows of the weight side by side
STEPS = 4  # of K in a record
WORDS = PANEL * STEPS
RECORD = WORDS + WORDS // 2  # bytes: codes, lower bytes
HEADER = np.dtype([("table", "u1", 16), ("list", "<u8"), ("raw", "<u8")])
_END = 0xFFFFFFFF
_LINE = 64

Bytes = npt.NDArray[np.uint8]


def _meta(
    input: torch.Tensor, weight: torch.Tensor, features: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    shape = [*input.shape[:-1], features]
    return torch.empty(shape, dtype=input.dtype, device=input.device)


@define(
    "coded_linear(Tensor input, Tensor weight, int features, Tensor? bias=None) -> Tensor", _meta
)
def coded_linear(
    input: torch.Tensor, weight: torch.Tensor, features: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """aten.linear with a weight as `encode` makes it.

    input bfloat16 [*, K], weight uint8 [bytes] that stands for bfloat16 [features, K], bias
    [features] or None -> bfloat16 [*, features].
    """
    plain = decode(weight, features, int(input.shape[-1]))
    return torch.nn.functional.linear(input, plain, bias)


def encode(weight: torch.Tensor) -> torch.Tensor:
    """bfloat16 [N, K] -> uint8 [bytes], from which `decode` gets the same bits back.

    The upper byte of a bf16 (sign, seven bits of exponent) goes by a table of the 16 most frequent
    in a panel of 32 rows; records of 32 x 4 weights where that is not enough keep theirs. The
    layout is described in graphc/kernels/gemm_coded.h.
    """
    n, k = weight.shape
    panels, records = -(-n // PANEL), -(-k // STEPS)
    headers = np.zeros(panels, HEADER)
    body = np.empty((panels, records, RECORD), np.uint8)
    lists: list[npt.NDArray[np.uint32]] = []
    raw: list[Bytes] = []
    for p in range(panels):
        words = _ordered(weight[p * PANEL : (p + 1) * PANEL], records)
        upper = (words >> 8).astype(np.uint8)
        counts = np.bincount(upper.reshape(-1), minlength=256)
        table = np.argsort(-counts, kind="stable")[:16].astype(np.uint8)
        spelling = np.full(256, 255, np.uint8)
        spelling[table] = np.arange(16, dtype=np.uint8)
        codes = np.frombuffer(upper.tobytes().translate(spelling.tobytes()), np.uint8)
        codes = codes.reshape(records, 2, WORDS // 2)
        whole = np.flatnonzero(codes.reshape(records, WORDS).max(1) == 255)
        headers["table"][p] = table
        body[p, :, : WORDS // 2] = codes[:, 0] & 15 | codes[:, 1] << 4
        body[p, :, WORDS // 2 :] = words.reshape(records, WORDS).astype(np.uint8)
        lists.append(np.append(whole, _END).astype("<u4"))
        raw.append(upper.reshape(records, WORDS)[whole])
    head = headers.nbytes + -headers.nbytes % _LINE
    kept = sum(part.nbytes for part in raw)
    place = head + body.nbytes
    headers["raw"] = place + np.cumsum([0, *(part.nbytes for part in raw)])[:-1]
    headers["list"] = place + kept + np.cumsum([0, *(part.nbytes for part in lists)])[:-1]
    parts = [headers, np.zeros(head - headers.nbytes, np.uint8), body, *raw, *lists]
    return torch.from_numpy(np.concatenate([part.reshape(-1).view(np.uint8) for part in parts]))


def decode(coded: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """uint8 [bytes] of `encode` -> bfloat16 [n, k]."""
    panels, records = -(-n // PANEL), -(-k // STEPS)
    data: Bytes = coded.numpy()
    headers = data[: panels * HEADER.itemsize].view(HEADER)
    head = headers.nbytes + -headers.nbytes % _LINE
    body = data[head : head + panels * records * RECORD].reshape(panels, records, RECORD)
    made = np.empty((panels * PANEL, records * STEPS), np.uint16)
    for p, header in enumerate(headers):
        both = body[p, :, : WORDS // 2]
        codes = np.stack((both & 15, both >> 4), 1).reshape(records, WORDS)
        upper = header["table"][codes]
        numbers = data[int(header["list"]) :]
        numbers = numbers[: len(numbers) // 4 * 4].view("<u4")[: records + 1]
        whole = numbers[: int(np.argmax(numbers == _END))]
        start = int(header["raw"])
        upper[whole] = data[start : start + len(whole) * WORDS].reshape(-1, WORDS)
        words = upper.astype(np.uint16) << 8 | body[p, :, WORDS // 2 :]
        made[p * PANEL : (p + 1) * PANEL] = _columns(words, records)
    return torch.from_numpy(made.view(np.int16))[:n, :k].contiguous().view(torch.bfloat16)


def _ordered(rows: torch.Tensor, records: int) -> npt.NDArray[np.uint16]:
    """bfloat16 [<= 32, K] -> [records, 128] in the order of bytes in a record: two steps of pairs,
    each as eight bytes of the first 16 columns and eight of the others in turn."""
    n, k = rows.shape
    filled = torch.nn.functional.pad(rows, (0, records * STEPS - k, 0, PANEL - n))
    pairs = filled.contiguous().view(torch.int16).numpy().view(np.uint32)
    ordered = pairs.reshape(2, 4, 4, records, 2).transpose(3, 4, 1, 0, 2)
    return np.ascontiguousarray(ordered).view(np.uint16).reshape(records, WORDS)


def _columns(words: npt.NDArray[np.uint16], records: int) -> npt.NDArray[np.uint16]:
    """The reverse: [records, 128] -> [32, records * 4]."""
    pairs = np.ascontiguousarray(words).view(np.uint32).reshape(records, 2, 4, 2, 4)
    rows = np.ascontiguousarray(pairs.transpose(3, 2, 4, 0, 1)).view(np.uint16)
    return rows.reshape(PANEL, records * STEPS)
