"""Weights of 8 or 4 bits with a scale for a group of neighbours in K: forms, encoding, decoding.

The layout is described in graphc/kernels/quantized_panels.h. MXFP4 is that of the OCP Microscaling
Formats specification 1.0: E2M1 elements, one E8M0 scale for 32 of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

PANEL = 32  # rows of the weight side by side
BLOCK = 8  # steps of K whose 4-bit codes share words of 32 bits
LINE = 64  # bytes of scales in a record
_ELEMENTS = 1 << 20  # encoded at a time

#: magnitudes of E2M1, and what lies between neighbours
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_BETWEEN = (_E2M1[1:] + _E2M1[:-1]) / 2
#: of the scale that would use up all codes; smaller ones clip the largest weights of a group
_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8)
_LEAST = 2.0**-120  # a group that would need a smaller scale is zero


@dataclass(frozen=True)
class Form:
    """bits: of a code; group: neighbours in K that share a scale; span: steps of K in a record;
    powers: scales are E8M0, else bfloat16."""

    bits: int
    group: int
    span: int
    powers: bool = False

    @property
    def record(self) -> int:
        """Bytes of a record of one panel."""
        return self.span * PANEL * self.bits // 8 + LINE


FORMS = {
    "int8": Form(8, 128, 128),
    "int4_g32": Form(4, 32, 32),
    "int4_g128": Form(4, 128, 128),
    "mxfp4": Form(4, 32, 64, powers=True),
}


def encode(weight: torch.Tensor, form: str) -> torch.Tensor:
    """A finite floating-point [N, K] -> uint8 [bytes] in one of FORMS.

    Weights are rounded to the nearest code, without looking at data. int8: codes of -127 to 127,
    the largest of 128 neighbours uses them up. int4: codes of -8 to 7 and a signed scale, so that
    the weight of largest magnitude may have code -8; of the scales that use all codes or clip the
    largest weights a little, the one of least squared error; five significant bits of it, so that
    every weight is exact in bfloat16. mxfp4: of the scale that the specification names and twice
    it the one of least squared error, the specification's where they are equal: what MXFP4 can
    say is kept exactly.
    """
    kind = FORMS[form]
    n, k = weight.shape
    panels, records = -(-n // PANEL), -(-k // kind.span)
    made = torch.empty((panels, records, kind.record), dtype=torch.uint8)
    some = max(1, _ELEMENTS // max(1, PANEL * records * kind.span))
    for first in range(0, panels, some):
        rows = weight[first * PANEL : (first + some) * PANEL].float()
        count = min(some, panels - first)
        rows = torch.nn.functional.pad(
            rows, (0, records * kind.span - k, 0, count * PANEL - len(rows))
        )
        codes, scales = _rounded(rows.contiguous().view(count * PANEL, -1, kind.group), kind)
        body = made[first : first + count]
        body[:, :, :-LINE] = _packed(codes.view(count, PANEL, records, kind.span), kind)
        body[:, :, -LINE:] = _scale_bytes(scales.view(count, PANEL, records, -1), kind)
    return made.view(-1)


def decode(coded: torch.Tensor, form: str, n: int, k: int) -> torch.Tensor:
    """uint8 [bytes] of `encode` -> float32 [n, k], exactly."""
    kind = FORMS[form]
    records = -(-k // kind.span)
    data = coded.view(-1, records, kind.record)
    codes = _unpacked(data[:, :, :-LINE], kind)
    scales = _scales(data[:, :, -LINE:], kind)
    values = _values(codes, kind).view(*scales.shape, kind.group) * scales[..., None]
    return values.reshape(-1, records * kind.span)[:n, :k].contiguous()


def nbytes(form: str, n: int, k: int) -> int:
    """Bytes that `encode` makes of [n, k]."""
    kind = FORMS[form]
    return -(-n // PANEL) * -(-k // kind.span) * kind.record


# ---------------------------------------------------------------- codes and scales


def _rounded(groups: torch.Tensor, kind: Form) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 (sign and magnitude, two's complement, E2M1) and scales float32 of float32
    [R, groups, group]."""
    found: tuple[torch.Tensor, torch.Tensor] | None = None
    least = torch.empty(0)
    largest = groups.abs().amax(-1, keepdim=True)  # squares of what is relative to it stay in range
    relative = torch.where(largest < torch.finfo(torch.float32).tiny, 0.0, 1 / largest)
    for scale in _candidates(groups, kind):
        codes = _codes(groups, scale, kind)
        values = _values(codes, kind) * scale[..., None]
        error = ((values - groups) * relative).square().sum(-1)
        if found is None:
            found, least = (codes, scale), error
            continue
        better = error < least
        found = (
            torch.where(better[..., None], codes, found[0]),
            torch.where(better, scale, found[1]),
        )
        least = torch.where(better, error, least)
    assert found is not None
    return found


def _candidates(groups: torch.Tensor, kind: Form) -> list[torch.Tensor]:
    place = groups.abs().argmax(-1, keepdim=True)
    extreme = groups.gather(-1, place).squeeze(-1)
    if kind.powers:
        exponent = torch.frexp(extreme.abs()).exponent - 1  # floor(log2)
        exponent = torch.where(extreme == 0, -127, exponent)
        powers = [(exponent + e).clamp(-127, 127) for e in (-2, -1)]
        return [_power_of_two(power) for power in powers]
    if kind.bits == 8:
        scale = (extreme.abs() / 127).bfloat16().float()
        return [scale.where(scale >= _LEAST, 0.0)]
    made = []
    for share in _SHARES:
        mantissa, exponent = torch.frexp(extreme * (share / -8))
        scale = torch.ldexp(torch.round(mantissa * 32) / 32, exponent)
        made.append(scale.where(scale.abs() >= _LEAST, 0.0))
    return made


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """float32 of int32 exponents from -127, which is subnormal, to 127."""
    bits = torch.where(exponent == -127, 1 << 22, exponent + 127 << 23)
    return bits.to(torch.int32).view(torch.float32)


def _codes(groups: torch.Tensor, scale: torch.Tensor, kind: Form) -> torch.Tensor:
    ones = torch.where(scale == 0, torch.inf, scale)[..., None]
    ratios = groups / ones
    if kind.powers:
        size = torch.bucketize(ratios.abs(), _BETWEEN, right=True)
        # ties go to the even code
        tie = (ratios.abs() == _BETWEEN[(size - 1).clamp(min=0)]) & (size % 2 == 1)
        return (size - tie.long() + 8 * ratios.signbit()).to(torch.uint8)
    if kind.bits == 8:
        near = ratios.round().clamp(-127, 127)
        return (near.abs() + 128 * (near < 0)).to(torch.uint8)
    return ratios.round().clamp(-8, 7).to(torch.int8).view(torch.uint8)


def _values(codes: torch.Tensor, kind: Form) -> torch.Tensor:
    """What codes stand for, float32, without their scales."""
    if kind.powers:
        return torch.cat((_E2M1, -_E2M1))[(codes & 15).long()]
    if kind.bits == 8:
        size = (codes & 127).float()
        return torch.where(codes > 127, -size, size)
    return ((codes & 15 ^ 8).to(torch.int8) - 8).float()


# ---------------------------------------------------------------- bytes


def _packed(codes: torch.Tensor, kind: Form) -> torch.Tensor:
    """uint8 [panels, 32, records, span] -> [panels, records, bytes of codes]."""
    panels, _, records, span = codes.shape
    if kind.bits == 8:
        pairs = codes.view(panels, PANEL, records, span // 2, 2)
        return pairs.permute(0, 2, 3, 1, 4).reshape(panels, records, -1)
    # step 2 (2 h + i) + p of a block: half byte i of byte h of half word p
    parts = (codes & 15).view(panels, PANEL, records, span // BLOCK, 2, 2, 2)
    both = parts[:, :, :, :, :, 0] | parts[:, :, :, :, :, 1] << 4  # [.., h, p]
    return both.permute(0, 2, 3, 1, 5, 4).reshape(panels, records, -1)


def _unpacked(data: torch.Tensor, kind: Form) -> torch.Tensor:
    """The reverse: [panels, records, bytes] -> [panels, 32, records, span]."""
    panels, records, _ = data.shape
    if kind.bits == 8:
        pairs = data.reshape(panels, records, -1, PANEL, 2)
        return pairs.permute(0, 3, 1, 2, 4).reshape(panels, PANEL, records, -1)
    both = data.reshape(panels, records, -1, PANEL, 2, 2).permute(0, 3, 1, 2, 5, 4)
    return torch.stack((both & 15, both >> 4), 5).reshape(panels, PANEL, records, -1)


def _scale_bytes(scales: torch.Tensor, kind: Form) -> torch.Tensor:
    """float32 [panels, 32, records, groups] -> uint8 [panels, records, 64]."""
    ordered = scales.permute(0, 2, 3, 1).contiguous()
    if kind.powers:
        ordered = (torch.frexp(ordered).exponent + 126).to(torch.uint8)
    else:
        ordered = ordered.bfloat16()
    return ordered.flatten(2).view(torch.uint8)


def _scales(lines: torch.Tensor, kind: Form) -> torch.Tensor:
    """The reverse: uint8 [panels, records, 64] -> float32 [panels, 32, records, groups]."""
    if kind.powers:
        scales = _power_of_two(lines.int() - 127)
    else:
        scales = lines.contiguous().view(torch.bfloat16).float()
    panels, records, _ = lines.shape
    return scales.view(panels, records, -1, PANEL).permute(0, 3, 1, 2)
