"""The graphc:: operators; importing this package registers them with torch."""

from graphc.ops.attention import attention
from graphc.ops.cached_attention import cached_attention, paged_attention, position_mask
from graphc.ops.coded_linear import coded_linear
from graphc.ops.delta_rule import delta_rule
from graphc.ops.experts import experts
from graphc.ops.integer_linear import integer_linear
from graphc.ops.lightning_indexer import lightning_indexer, paged_lightning_indexer
from graphc.ops.pages import append_pages, read_pages
from graphc.ops.pooled_indexer import append_ring, pool_keys, pooled_indexer
from graphc.ops.quantized_linear import quantized_grouped_mm, quantized_linear
from graphc.ops.record_pages import append_records, read_records
from graphc.ops.recurrent import gru, lstm
from graphc.ops.residual_mix import residual_mix
from graphc.ops.route import route
from graphc.ops.short_convolution import short_convolution
from graphc.ops.sinkhorn import sinkhorn
from graphc.ops.sparse_attention import latent_attention, sparse_attention

__all__ = [
    "append_pages", "append_records", "append_ring", "attention", "cached_attention",
    "coded_linear", "delta_rule", "experts", "gru", "integer_linear", "latent_attention",
    "lightning_indexer", "lstm", "paged_attention", "paged_lightning_indexer", "pool_keys",
    "pooled_indexer", "position_mask", "quantized_grouped_mm", "quantized_linear", "read_pages",
    "read_records", "residual_mix", "route", "short_convolution", "sinkhorn", "sparse_attention",
]  # fmt: skip
