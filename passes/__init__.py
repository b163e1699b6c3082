"""The pipeline, in order, to be read aloud. One file a pass, named as the pass."""

from graphc.rewrite import Pass
from passes.fusion.absorbed_latent import AbsorbedLatent
from passes.fusion.activation import Activation
from passes.fusion.attention import Attention
from passes.fusion.attention_residuals import AttentionResiduals
from passes.fusion.causal_attention import CausalAttention
from passes.fusion.chosen_keys import ChosenKeys
from passes.fusion.delta_rule import DeltaRule
from passes.fusion.grouped_query import GroupedQuery
from passes.fusion.late_heads import LateHeads
from passes.fusion.layer_norm import LayerNorm
from passes.fusion.lightning_indexer import LightningIndexer
from passes.fusion.merged_linear import MergedLinear
from passes.fusion.paged_attention import PagedAttention
from passes.fusion.residual_norm import ResidualNorm
from passes.fusion.rms_norm import RmsNorm
from passes.fusion.routing import Routing
from passes.fusion.sinkhorn import Sinkhorn
from passes.fusion.softmax import Softmax
from passes.fusion.split_attention import SplitAttention
from passes.precision.wide_residuals import WideResiduals
from passes.quantization.integer_conv import IntegerConv
from passes.quantization.integer_linear import IntegerLinear
from passes.quantization.quantize_index import QuantizeIndex
from passes.quantization.quantize_kv import QuantizeKv
from passes.quantization.quantize_weights import QuantizeWeights
from passes.simplify.arithmetic import Arithmetic
from passes.simplify.assembled import Assembled
from passes.simplify.common_subexpressions import CommonSubexpressions
from passes.simplify.constant_folding import ConstantFolding
from passes.simplify.dead_code import DeadCode
from passes.simplify.fold_batch_norm import FoldBatchNorm
from passes.simplify.index_arithmetic import IndexArithmetic
from passes.simplify.joined_slices import JoinedSlices
from passes.simplify.linear_from_matmul import LinearFromMatmul
from passes.simplify.view_simplification import ViewSimplification
from passes.weights.coded_linear import CodedLinear

PIPELINE: tuple[Pass, ...] = (
    ViewSimplification(),  # first: fewer spellings of views for everything after it
    LinearFromMatmul(),  # before folding, which would copy the transposed weights it looks through
    ConstantFolding(),  # gains such as 1 + w, position tables, masks become weights
    IndexArithmetic(),  # masks that turn out to be True everywhere
    Arithmetic(),  # multiplications by one that folding has laid open
    ViewSimplification(),  # expansions move behind what masks are made of
    CommonSubexpressions(),  # patterns may now ask "the same value?" by identity
    IntegerLinear(),  # quantized weights are constants less their zero points by now
    IntegerConv(),
    FoldBatchNorm(),  # into convolutions whose weights are known to be constant by now
    Activation(),  # gelu, silu, ...: one operator where the model wrote five
    Softmax(),  # before attention, which looks for it
    LayerNorm(),  # before rms_norm, which would take its second half
    RmsNorm(),
    AttentionResiduals(),  # after softmax and rms_norm, which score the candidates
    ResidualNorm(),  # the mix of a sub-layer's input is normalised where it is made
    SplitAttention(),  # keys in parts become one matrix, before attention looks for it
    Attention(),  # scores never in memory
    ChosenKeys(),  # before causal_attention, which would take the mask apart
    CausalAttention(),  # half the work where the mask is a triangle
    GroupedQuery(),  # keys and values read once per group of heads
    LightningIndexer(),  # scores and choice of keys in one, or no choice at all
    Assembled(),  # keys filled part by part, before absorption looks at their parts
    AbsorbedLatent(),  # keys and values are not expanded for chosen keys, or for one token
    PagedAttention(),  # what is left reads the pages themselves
    Routing(),  # after activation and softmax, whose operators make the scores
    Sinkhorn(),  # the rounds of a hyper-connection in registers
    DeltaRule(),  # norms and strengths that linear attention has in registers anyway
    MergedLinear(),  # after attention: products of one input become one
    JoinedSlices(),  # what was put side by side is, in the merged product
    LateHeads(),  # after all that looks for views of products: what follows joins the product
    WideResiduals(),  # after all that looks for sums and norms in the model's own format
    ViewSimplification(),  # what the rewrites above left between views
    CommonSubexpressions(),
    QuantizeIndex(),  # only where asked for; after all that fuses what reads the rows
    QuantizeKv(),
    QuantizeWeights(),  # if asked for; products are merged, and routers known, by now
    CodedLinear(),  # last of all that looks for linears
    DeadCode(),  # last: nothing unread reaches lowering
)

__all__ = ["PIPELINE"]
