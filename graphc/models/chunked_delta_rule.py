"""The delta rule in chunks: products of matrices instead of a step a token, differentiable.

Inside a chunk of C tokens, with G the sum of the log-decays so far (Kimi Linear, arXiv:2510.26692):

    N_ij = beta_i sum_c k_ic k_jc exp(G_ic - G_jc)   j < i       T = (I + N)^-1
    P_ij = scale sum_c q_ic k_jc exp(G_ic - G_jc)    j <= i
    W = T beta (k exp G)       U = T beta v       K = k exp(G_last - G)
    u = U - W S       o = scale q exp(G) S + P u       S' = exp(G_last) S + K^T u

Only S goes from chunk to chunk: S' = (diag exp(G_last) - K^T W) S + K^T U. exp(G_i - G_j) as the
product of exp(G_i) and exp(-G_j) overflows: both go over a row between i and j.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

#: under the root of the sum of squares, as in fla and transformers
NORM_EPS = 1e-6
#: tokens in a chunk, where no log-decay is below -BOUND: half a chunk can be undone in float32
BOUNDED_CHUNK = 32
BOUND = 5.0
#: tokens in a chunk otherwise, and in the blocks of a chunk in which differences are taken singly
CHUNK = 64
BLOCK = 16


def delta_rule(
    state: Tensor | None, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor,
    slots: Tensor | None = None, *, scale: float, normalize: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `graphc::delta_rule`: (o [B, T, H, V] of value's dtype, the states after the last token).

    state [N, H, K, V] or None, query and key [B, T, Hk, K], value [B, T, H, V], decay [B, T, H, K]
    or [B, T, H], beta [B, T, H], slots int32 [B].
    """
    kind = torch.float64 if value.dtype == torch.float64 else torch.float32
    q, k, v, g, b = (x.to(kind) for x in (query, key, value, decay, beta))
    if normalize:
        q, k = (x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt() for x in (q, k))
    group = v.shape[2] // k.shape[2]
    if group > 1:
        q, k = q.repeat_interleave(group, 2), k.repeat_interleave(group, 2)
    g = g.unsqueeze(-1).expand(k.shape) if g.dim() == 3 else g
    if state is None:
        now = v.new_zeros([v.shape[0], v.shape[2], k.shape[3], v.shape[3]])
    else:
        now = (state if slots is None else state[slots.long()]).to(kind)
    q, k, v, g = (x.transpose(1, 2) for x in (q * scale, k, v, g))
    b = b.transpose(1, 2).unsqueeze(-1)
    step = _token if v.shape[2] == 1 else _chunks
    out, now = step(now, q, k, v, g, b)
    if state is not None:
        now = now.to(state.dtype)
        now = now if slots is None else state.index_copy(0, slots.long(), now)
    return out.transpose(1, 2).to(value.dtype), now


def _token(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor
) -> tuple[Tensor, Tensor]:
    """One token: q, k, g [B, H, 1, K], v [B, H, 1, V], b [B, H, 1, 1]."""
    state = state * g.transpose(2, 3).exp()
    u = b * (v - k @ state)
    state = state + k.transpose(2, 3) @ u
    return q @ state, state


def _chunks(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens in chunks: as `_token`, T along dimension 2. Tokens of k = 0, beta = 0, g = 0 leave
    the state as it is; they fill the last chunk."""
    batch, heads, length, _ = q.shape
    bounded = decays_are_bounded(g)
    size = min(BOUNDED_CHUNK if bounded else CHUNK, -(-length // BLOCK) * BLOCK)
    if missing := -length % size:
        q, k, v, g, b = (F.pad(x, [0, 0, 0, missing]) for x in (q, k, v, g, b))
    # [B * H, chunks, C, .]
    q, k, v, g, b = (x.reshape(batch * heads, -1, size, x.shape[3]) for x in (q, k, v, g, b))
    total = g.cumsum(2)
    products = _bounded_products if bounded else _products
    against_key, against_query = products(q, k, total)
    grown = total.exp()
    solved = torch.linalg.solve_triangular(
        b * against_key.tril(-1), b * torch.cat([k * grown, v], -1),
        upper=False, unitriangular=True,
    )  # fmt: skip
    last = total[:, :, -1:]
    kept = (k * (last - total).exp()).transpose(2, 3)
    taken, added = (kept @ solved).split([k.shape[3], v.shape[3]], -1)
    carry = torch.diag_embed(last.squeeze(2).exp()) - taken
    now = state.reshape(batch * heads, *state.shape[2:])
    entered = []
    for chunk_carry, chunk_added in zip(carry.unbind(1), added.unbind(1), strict=True):
        entered.append(now)
        now = torch.baddbmm(chunk_added, chunk_carry, now)
    before = torch.stack(entered, 1)
    w, u = solved.split([k.shape[3], v.shape[3]], -1)
    out = (q * grown) @ before + against_query.tril() @ (u - w @ before)
    out = out.reshape(batch, heads, -1, v.shape[3])[:, :, :length]
    return out, now.reshape(state.shape)


def decays_are_bounded(g: Tensor) -> bool:
    """Whether no log-decay is below -BOUND. Who knows may replace this by a constant."""
    return bool(g.detach().min() >= -BOUND)


def _bounded_products(q: Tensor, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """sum_c x_ic k_jc exp(G_ic - G_jc) for x = k and x = q: two of [M, n, C, C], right for j < i
    and j <= i; above the diagonal they hold anything, infinities too.

    Each exponent goes over the row in the middle.
    """
    middle = total.shape[2] // 2
    gap = total - total[:, :, middle : middle + 1]
    up = gap.exp()
    right = (k * (-gap).exp()).transpose(2, 3)
    return (k * up) @ right, (q * up) @ right


def _products(q: Tensor, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """As `_bounded_products`, for any decays.

    Against earlier blocks the exponents go over the first row of the query's block, both at most
    0. Within a block every difference is taken as it is.
    """
    shape = (*q.shape[:2], -1, BLOCK, q.shape[3])
    both = torch.cat([k.view(shape), q.view(shape)], 3)  # [M, n, blocks, 2 BLOCK, K]
    inside = total.view(shape)
    row = inside[:, :, :, :1]
    left = both * (inside - row).exp().repeat(1, 1, 1, 2, 1)
    own = _differences(both, k.view(shape), inside)
    rows = []
    for block in range(inside.shape[2]):
        end = block * BLOCK
        decayed = k[:, :, :end] * (row[:, :, block] - total[:, :, :end]).exp()
        earlier = left[:, :, block] @ decayed.transpose(2, 3)
        later = k.shape[2] - end - BLOCK
        rows.append(F.pad(torch.cat([earlier, own[:, :, block]], -1), [0, later]))
    against_key, against_query = torch.stack(rows, 2).split(BLOCK, 3)
    square = (*q.shape[:3], k.shape[2])
    return against_key.reshape(square), against_query.reshape(square)


def _differences(both: Tensor, keys: Tensor, inside: Tensor) -> Tensor:
    """The blocks on the diagonal, each exponent by itself; [M, n, blocks, 2 BLOCK, BLOCK]."""
    gap = inside.unsqueeze(4) - inside.unsqueeze(3)
    after = torch.ones(BLOCK, BLOCK, dtype=torch.bool).triu(1).unsqueeze(2)
    weighted = keys.unsqueeze(3) * gap.masked_fill(after, 0.0).exp()
    parts = both.unflatten(3, [2, BLOCK]).unsqueeze(5)
    products: Tensor = (parts * weighted.unsqueeze(3)).sum(-1)
    return products.flatten(3, 4)
