"""Rows of numbers as records of bytes: narrow codes, their scales, and what stays as it is.

A format is segments side by side, written "KIND:WIDTH+KIND:WIDTH", each as [codes][scales] or as
plain numbers. "fp8:512+bf16:64" is the 656-byte record of DeepSeek-V3.2's latent cache.

"mxfp8_floor:128@16": the records of 16 rows of a page share their bytes, so that what scores keys
finds a pair of codes of 16 keys side by side: [WIDTH / 4][4 keys of 16][2 pairs][4][2] codes, then
[WIDTH / 32][16] scales.

| kind | codes | scales |
|---|---|---|
| mxfp8_floor, mxfp8_ceil, mxfp8_even | E4M3, a byte each | E8M0, a byte for 32 (OCP MX v1.0) |
| fp8, fp8_pow2 | E4M3, a byte each | float32 for 128; with pow2 a power of two |
| bf16, f16, f32 | the numbers | none |

E4M3: nearest, ties to even, saturating at 448. Of a block of MXFP8 with the largest magnitude m,
the scale is 2^e, e = floor(log2 m) - 8 (floor: numbers beyond 448 x 2^e saturate), the least that
saturates nothing (ceil), or that of floor with m rounded to three bits of mantissa (even). Of a
tile of FP8 it is max(m, 1e-4) / 448, with pow2 the next power of two. A block or tile that holds an
infinity or NaN reads as NaN throughout; nothing else does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from graphc.errors import UsageError

BLOCK, TILE, GROUP = 32, 128, 16
LARGEST = 448.0
LEAST = 1e-4  # a tile's largest magnitude is taken to be at least this
PLAIN = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
MX = ("mxfp8_floor", "mxfp8_ceil", "mxfp8_even")
FP8 = ("fp8", "fp8_pow2")


@dataclass(frozen=True)
class Segment:
    """`width` numbers of one kind."""

    kind: str
    width: int

    @property
    def scales(self) -> int:
        """How many there are."""
        if self.kind in PLAIN:
            return 0
        return -(-self.width // (BLOCK if self.kind in MX else TILE))

    @property
    def bytes(self) -> int:
        if self.kind in PLAIN:
            return self.width * PLAIN[self.kind].itemsize
        return self.width + self.scales * (1 if self.kind in MX else 4)

    def __str__(self) -> str:
        return f"{self.kind}:{self.width}"


@dataclass(frozen=True)
class RecordFormat:
    """What a record of `bytes` bytes holds: `width` numbers."""

    segments: tuple[Segment, ...]
    together: bool = False  # the records of 16 rows share their bytes

    @property
    def width(self) -> int:
        return sum(part.width for part in self.segments)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.segments)

    def __str__(self) -> str:
        return "+".join(map(str, self.segments)) + (f"@{GROUP}" if self.together else "")

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., width] of any floating dtype -> uint8 [..., bytes]."""
        parts: list[torch.Tensor] = []
        for part, numbers in zip(self.segments, self._split(rows), strict=True):
            if part.kind in PLAIN:
                parts.append(_bytes(numbers.to(PLAIN[part.kind])))
            elif part.kind in MX:
                parts += encode_mxfp8(numbers, part.kind.removeprefix("mxfp8_"))
            else:
                codes, scales = encode_fp8(numbers, power_of_two=part.kind == "fp8_pow2")
                parts += [codes, _bytes(scales)]
        return torch.cat(parts, -1)

    def decode(self, records: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """uint8 [..., bytes] -> [..., width] in `dtype`."""
        made: list[torch.Tensor] = []
        at = 0
        for part in self.segments:
            piece = records[..., at : at + part.bytes]
            at += part.bytes
            if part.kind in PLAIN:
                made.append(_numbers(piece, PLAIN[part.kind]).to(dtype))
                continue
            codes, scales = piece[..., : part.width], piece[..., part.width :]
            if part.kind in MX:
                made.append(decode_mxfp8(codes, scales).to(dtype))
            else:
                made.append(decode_fp8(codes, _numbers(scales, torch.float32)).to(dtype))
        return torch.cat(made, -1)

    def gathered(self, pages: torch.Tensor) -> torch.Tensor:
        """Pages uint8 [..., P, bytes] of this format with a record after the other."""
        if not self.together:
            return pages
        groups = pages.reshape(*pages.shape[:-2], -1, GROUP * self.bytes)
        codes, scales = groups.split([GROUP * self.width, GROUP * (self.bytes - self.width)], -1)
        codes = _reordered(codes.unflatten(-1, (-1, 4, 2, 4, 2)), (1, 3, 0, 2, 4))
        codes = codes.flatten(-3).flatten(-3, -2)
        rows = torch.cat([codes, scales.unflatten(-1, (-1, GROUP)).mT], -1)
        return rows.reshape(pages.shape)

    def spread(self, records: torch.Tensor) -> torch.Tensor:
        """The reverse of `gathered`."""
        if not self.together:
            return records
        groups = records.unflatten(-2, (-1, GROUP))
        codes, scales = groups.split([self.width, self.bytes - self.width], -1)
        codes = codes.unflatten(-1, (-1, 2, 2)).unflatten(-4, (4, 4))
        codes = _reordered(codes, (2, 0, 3, 1, 4))
        made = torch.cat([codes.flatten(-5), scales.mT.flatten(-2)], -1)
        return made.reshape(records.shape)

    def _split(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.split(rows, [part.width for part in self.segments], -1)


@lru_cache
def record_format(text: str) -> RecordFormat:
    """The format of its text.

    Raises:
        UsageError: it is none.
    """
    made: list[Segment] = []
    segments, at, group = text.partition("@")
    for piece in segments.split("+"):
        kind, _, width = piece.partition(":")
        if kind not in (*MX, *FP8, *PLAIN) or not width.isdigit() or int(width) == 0:
            known = ", ".join((*MX, *FP8, *PLAIN))
            raise UsageError(
                f"expected KIND:WIDTH+..., found {text!r}", hint=f"kinds of numbers: {known}"
            )
        made.append(Segment(kind, int(width)))
    if at and (group != str(GROUP) or len(made) > 1 or kind not in MX or int(width) % 64):
        raise UsageError(
            f"expected one segment of MXFP8, a multiple of 64 wide, before @{GROUP}, found {text!r}"
        )
    return RecordFormat(tuple(made), bool(at))


def encode_mxfp8(numbers: torch.Tensor, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., n] -> E4M3 codes uint8 [..., n], E8M0 scales uint8 [..., ceil(n / 32)].

    rule: floor, ceil or even, see the module's text.
    """
    blocks = _blocks(numbers.float(), BLOCK)
    most = blocks.abs().amax(-1)
    finite = most.isfinite()
    mantissa, exponent = torch.frexp(torch.where(finite, most, 1.0).double())
    if rule == "ceil":  # the least with most <= 448 x scale; 448 = 0.875 x 2^9
        exponent = exponent - 9 + (mantissa > 0.875).int()
    else:
        if rule == "even":
            exponent = exponent + (torch.round(mantissa * 16) == 16).int()
        exponent = exponent - 9
    exponent = torch.where(most == 0, -127, exponent).clamp(-127, 127)
    exponent = torch.where(finite, exponent, 0)
    scaled = torch.ldexp(blocks.double(), -exponent[..., None])
    codes = encode_e4m3(scaled).flatten(-2)[..., : numbers.shape[-1]]
    scales = torch.where(finite, exponent + 127, 255).to(torch.uint8)
    return codes.contiguous(), scales


def decode_mxfp8(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 [..., n] of what `encode_mxfp8` gives."""
    exponent = scales.to(torch.int32) - 127
    scale = torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent)
    scale = torch.where(scales == 255, torch.nan, scale)
    blocks = _blocks(decode_e4m3(codes).double(), BLOCK) * scale[..., None]
    return blocks.flatten(-2)[..., : codes.shape[-1]].float()


def encode_fp8(numbers: torch.Tensor, *, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., n] -> E4M3 codes uint8 [..., n], scales float32 [..., ceil(n / 128)]."""
    tiles = _blocks(numbers.float(), TILE)
    most = tiles.abs().amax(-1)
    finite = most.isfinite()
    scale = torch.where(finite, most, 1.0).clamp(min=LEAST) / LARGEST
    if power_of_two:
        mantissa, exponent = torch.frexp(scale)
        exponent = exponent - (mantissa == 0.5).int()
        scale = torch.ldexp(torch.ones_like(scale), exponent)
    codes = encode_e4m3(tiles / scale[..., None]).flatten(-2)[..., : numbers.shape[-1]]
    return codes.contiguous(), torch.where(finite, scale, torch.nan)


def decode_fp8(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 [..., n] of what `encode_fp8` gives."""
    tiles = _blocks(decode_e4m3(codes), TILE) * scales[..., None]
    return tiles.flatten(-2)[..., : codes.shape[-1]]


def encode_e4m3(numbers: torch.Tensor) -> torch.Tensor:
    """uint8 codes of the nearest numbers of E4M3; beyond 448, infinity included, 448; NaN is 0x7F.

    The conversion of torch is not asked about what E4M3 has no number for: its versions differ.
    """
    nan = numbers.isnan()
    clamped = torch.where(nan, 0.0, numbers.float()).clamp(-LARGEST, LARGEST)
    codes = clamped.to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(nan, 0x7F, codes)


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """float32 of E4M3 codes."""
    numbers: torch.Tensor = codes.contiguous().view(torch.float8_e4m3fn).float()
    return numbers


def _blocks(numbers: torch.Tensor, size: int) -> torch.Tensor:
    """[..., n] -> [..., ceil(n / size), size], zeros behind."""
    count = -(-numbers.shape[-1] // size)
    filled = torch.nn.functional.pad(numbers, (0, count * size - numbers.shape[-1]))
    made: torch.Tensor = filled.unflatten(-1, (count, size))
    return made


def _reordered(tensor: torch.Tensor, last: Sequence[int]) -> torch.Tensor:
    """The last dimensions in another order."""
    before = tensor.dim() - len(last)
    return tensor.permute(*range(before), *(before + place for place in last))


def _bytes(numbers: torch.Tensor) -> torch.Tensor:
    """[..., n] -> uint8 [..., n * itemsize]."""
    return numbers.contiguous().view(torch.uint8)


def _numbers(records: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 [..., n * itemsize] -> [..., n]."""
    made: torch.Tensor = records.clone(memory_format=torch.contiguous_format).view(dtype)
    return made
