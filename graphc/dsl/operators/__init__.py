"""Operators written in the language, registered where this package is imported."""

from graphc.dsl.operators.gated_delta_net import gated_delta_net
from graphc.dsl.operators.gated_linear_attention import gated_linear_attention
from graphc.dsl.operators.kda import kda
from graphc.dsl.operators.mamba2_ssd import mamba2_ssd

__all__ = ["gated_delta_net", "gated_linear_attention", "kda", "mamba2_ssd"]
