"""Operations of the reference hybrid (`graphc.models.hybrid`), counted from its configuration.

Two for a multiply-add, and nothing that a formulation adds: what a prompt of so many tokens takes,
whatever computes it. Norms, rotations, gates and routing are left out (about one in a hundred).
"""

from __future__ import annotations

from graphc.models.hybrid_config import HybridConfig

#: tokens of a chunk of the delta rule: what the chunked form counts with
DELTA_CHUNK = 64


def prefill(config: HybridConfig, tokens: int) -> dict[str, float]:
    """Operations of a prompt, by what does them. Only "indexer" grows with the square of its
    length; the rest by token, attention over chosen keys once there are more than are chosen."""
    c, kinds = config, config.layers
    kda, latent, dsa = kinds.count("kda"), len(kinds) - kinds.count("kda"), kinds.count("dsa")
    products = kda * _kda_products(c) + latent * _latent_products(c) + dsa * _indexer_products(c)
    dense = min(c.first_dense, len(kinds))
    products += 6 * dense * c.hidden_size * c.intermediate_size
    sparse = len(kinds) - dense
    products += sparse * 2 * c.hidden_size * (c.experts + 3 * c.shared_experts * c.expert_size)
    experts = sparse * 6 * c.experts_per_token * c.hidden_size * c.expert_size
    pairs = tokens * (tokens + 1) / 2  # of a query and a key up to it
    attention = 2 * c.heads * (2 * c.latent_dim + c.rope_dim)
    chosen = dsa * _chosen(tokens, c.index_topk) + (latent - dsa) * pairs
    return {
        "products": tokens * products + 2.0 * c.hidden_size * c.vocab_size,
        "experts": tokens * float(experts),
        "delta rule": tokens * float(kda * _delta_rule(c)),
        "attention": attention * float(chosen),
        "indexer": dsa * 2.0 * c.index_heads * (c.index_dim + 1) * pairs,  # and the heads' weights
    }


def total(config: HybridConfig, tokens: int) -> float:
    """All operations of a prompt."""
    return sum(prefill(config, tokens).values())


def _kda_products(c: HybridConfig) -> int:
    """Query, key, value, output; the gates through one head's width; the convolution."""
    width = c.kda_heads * c.kda_head_dim
    low = 2 * (c.hidden_size + width) * c.kda_head_dim
    return 2 * (4 * c.hidden_size * width + low + c.hidden_size * c.kda_heads) + (
        2 * 3 * width * c.conv_width
    )


def _delta_rule(c: HybridConfig) -> int:
    """The chunked form with keys and values of one width d, by token and head: six products
    with the state [d, d]; within a chunk of n, by triangles, two of scores (n d each), the solve
    for keys and values (2 n d) and the scores times values (n d)."""
    d, n = c.kda_head_dim, DELTA_CHUNK
    return c.kda_heads * (6 * d * d + 5 * n * d)


def _latent_products(c: HybridConfig) -> int:
    """Down, up, the keys' expansion absorbed into queries, the values' into outputs, output."""
    wide = c.heads * (c.nope_dim + c.rope_dim)
    size = c.hidden_size
    queries = size * wide if c.query_rank is None else c.query_rank * (size + wide)
    rows = size * (c.latent_dim + c.rope_dim)
    expansions = c.heads * c.latent_dim * (c.nope_dim + c.value_dim)
    return 2 * (queries + rows + expansions + c.heads * c.value_dim * size)


def _indexer_products(c: HybridConfig) -> int:
    queries = (c.query_rank or c.hidden_size) * c.index_heads * c.index_dim
    return 2 * (queries + c.hidden_size * (c.index_dim + c.index_heads))


def _chosen(tokens: int, count: int) -> int:
    """Keys that all queries of a prompt attend to together."""
    full = min(tokens, count)
    return full * (full + 1) // 2 + (tokens - full) * count
