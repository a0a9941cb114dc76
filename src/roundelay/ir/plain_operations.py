"""The operations that a graph as data may contain, by name; all others are refused.

A name such as ``aten.linear.default`` is an operator of torch with its overload. Left out on purpose is what takes a
file, memory or code (``from_file``, ``set_``, ``as_strided``), and what returns memory that nothing has been written
into (``empty``), which may hold what its machine had there before. Names are looked up in a table and never resolved.
"""

from __future__ import annotations

PASS_ON, KEYED_CALL = "roundelay.pass_on", "roundelay.keyed_call"
"""Passes a value on; draws random numbers by a key, with the operator as its first argument."""

HOUSE = (
    *(PASS_ON, KEYED_CALL, "roundelay.keyed_dropout", "roundelay.keyed_attention"),
    *("roundelay.count_labels", "roundelay.cumulative_batch_norm", "roundelay.branch"),
)
"""Functions of Roundelay."""

SCOPES = ("torch.set_grad_enabled", "torch.autocast")
"""Run a graph, which is one of their arguments, with gradients off or on, or in another precision."""

PYTHON = (
    *("python.getitem", "python.add", "python.sub", "python.mul", "python.truediv", "python.floordiv", "python.mod"),
    *("python.neg", "python.eq", "python.ne", "python.lt", "python.le", "python.gt", "python.ge"),
    *("python.and", "python.or", "python.not", "math.sqrt", "math.ceil", "math.floor", "math.trunc"),
    *("torch.sym_int", "torch.sym_float", "torch.sym_max", "torch.sym_min", "torch.sym_not", "torch.sym_ite"),
)
"""Arithmetic of numbers, and parts of what an operator returns."""


def _aten(overload: str, names: str) -> tuple[str, ...]:
    return tuple(f"aten.{name}.{overload}" for name in names.split())


RANDOM = (
    *_aten("default", "dropout feature_dropout alpha_dropout feature_alpha_dropout native_dropout bernoulli"),
    *_aten("default", "rand_like randn_like rand randn multinomial rrelu scaled_dot_product_attention"),
    *("aten.bernoulli.p", "aten.randint.default", "aten.randint.low", "aten.randint_like.default"),
    *("aten.randint_like.low_dtype", "aten.randperm.default", "aten.normal.Tensor_Tensor", "aten.normal.Tensor_float"),
    *("aten.bernoulli_.float", "aten.uniform_.default", "aten.normal_.default", "aten.exponential_.default"),
    *("aten.normal.float_Tensor", "aten.poisson.default", "aten.exponential.default", "aten.uniform.default"),
    *("aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input", "aten.rnn_relu.input"),
)
"""Operators that may draw random numbers: as the first argument of a keyed call, in a loss, or without drawing."""

_POINTWISE = (
    *_aten("default", "abs acos acosh asin asinh atan atanh atan2 ceil cos cosh deg2rad digamma erf erfc erfinv exp"),
    *_aten("default", "exp2 expm1 floor frac isfinite isinf isnan isneginf isposinf lgamma log log10 log1p log2 logit"),
    *_aten("default", "logaddexp logical_and logical_not logical_or logical_xor neg positive reciprocal round rsqrt"),
    *_aten("default", "sigmoid sign signbit sgn sin sinc sinh sqrt square tan tanh trunc nan_to_num bitwise_not"),
    *_aten("default", "maximum minimum fmax fmin clamp clamp_min clamp_max hypot special_i0 special_expit"),
    *_aten("default", "relu relu6 gelu silu selu elu celu mish softplus softshrink hardshrink hardtanh hardswish"),
    *_aten("default", "hardsigmoid leaky_relu log_sigmoid prelu glu threshold addcmul addcdiv polar real imag conj"),
    *_aten("Tensor", "add sub rsub mul div bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__ eq ne lt le gt"),
    *_aten("Tensor", "ge remainder fmod clamp copysign ldexp true_divide"),
    *_aten("Scalar", "add sub rsub mul div bitwise_and bitwise_or __and__ __or__ eq ne lt le gt ge remainder fmod"),
    *_aten("Scalar", "lerp where floor_divide"),
    *("aten.lerp.Tensor", "aten.div.Tensor_mode", "aten.div.Scalar_mode", "aten.min.other", "aten.max.other"),
    *("aten.pow.Tensor_Scalar", "aten.pow.Tensor_Tensor", "aten.pow.Scalar", "aten.where.self", "aten.where.default"),
    *("aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.round.decimals", "aten.xlogy.Tensor"),
    *("aten.masked_fill.Scalar", "aten.masked_fill.Tensor", "aten.clamp_min.Tensor", "aten.clamp_max.Tensor"),
    *("aten.isclose.default", "aten.special_xlog1py.default"),
)

_REDUCTIONS = (
    *_aten("default", "sum mean prod amax amin argmax argmin all any max min std var logcumsumexp cumsum median"),
    *_aten("default", "cosine_similarity pairwise_distance count_nonzero allclose equal trace"),
    *_aten("dim", "mean all any max min std var var_mean std_mean median"),
    *_aten("correction", "std var std_mean var_mean"),
    *("aten.prod.dim_int", "aten.floor_divide.default", "aten.sum.dim_IntList"),
    *("aten.logsumexp.default", "aten.norm.Scalar", "aten.norm.ScalarOpt_dim"),
    *("aten.linalg_vector_norm.default", "aten.cumprod.default", "aten.topk.default", "aten.sort.default"),
    *("aten.sort.stable", "aten.argsort.default", "aten.argsort.stable", "aten.all.dims", "aten.any.dims"),
    *("aten.cummax.default", "aten.cummin.default", "aten.kthvalue.default", "aten.diff.default"),
    *("aten.linalg_norm.default", "aten.linalg_matrix_norm.default", "aten.frobenius_norm.dim"),
)

_LAYERS = (
    *_aten("default", "linear matmul mm bmm addmm baddbmm addbmm mv dot outer einsum bilinear embedding conv1d conv2d"),
    *_aten("default", "conv3d conv_transpose1d convolution layer_norm rms_norm group_norm batch_norm instance_norm"),
    *_aten("default", "scaled_dot_product_attention _safe_softmax native_layer_norm native_group_norm tensordot"),
    *_aten("default", "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d avg_pool2d avg_pool3d avg_pool1d"),
    *_aten("default", "max_pool1d max_pool2d max_pool3d max_pool2d_with_indices adaptive_max_pool2d pixel_shuffle"),
    *_aten("default", "pixel_unshuffle channel_shuffle grid_sampler affine_grid_generator kron cross chain_matmul"),
    *_aten("default", "linalg_cross linalg_multi_dot cdist _weight_norm"),
    *("aten.conv_transpose2d.input", "aten.conv_transpose3d.input", "aten.conv1d.padding", "aten.conv2d.padding"),
    *("aten.conv3d.padding", "aten.softmax.int", "aten.log_softmax.int", "aten._softmax.default"),
    *("aten._log_softmax.default", "aten.upsample_nearest2d.vec", "aten.upsample_nearest1d.vec"),
    *("aten.upsample_bilinear2d.vec", "aten.upsample_bicubic2d.vec", "aten.upsample_linear1d.vec"),
    *("aten.upsample_nearest2d.default", "aten.upsample_bilinear2d.default"),
)

_LOSSES = _aten(
    "default",
    "cross_entropy_loss nll_loss nll_loss_nd nll_loss2d mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss "
    "binary_cross_entropy binary_cross_entropy_with_logits kl_div poisson_nll_loss "
    "cosine_embedding_loss hinge_embedding_loss margin_ranking_loss multi_margin_loss multilabel_margin_loss "
    "triplet_margin_loss",
)

_VIEWS = (
    *_aten("default", "alias view reshape expand expand_as view_as reshape_as permute unsqueeze squeeze t numel"),
    *_aten("default", "contiguous clone detach lift_fresh_copy repeat roll flip cat stack concat hstack vstack"),
    *_aten("default", "split_with_sizes chunk pad constant_pad_nd tile tril triu diag_embed ravel"),
    *_aten("default", "broadcast_to broadcast_tensors narrow unfold swapaxes swapdims atleast_1d resolve_conj"),
    *_aten("int", "select transpose unbind unflatten sym_size size movedim softmax"),
    *("aten.slice.Tensor", "aten.split.Tensor", "aten.split.sizes", "aten.split.default", "aten.squeeze.dim"),
    *("aten.squeeze.dims", "aten.flatten.using_ints", "aten.unflatten.int", "aten.movedim.intlist"),
    *("aten.tensor_split.sections", "aten.tensor_split.indices", "aten.narrow.default", "aten.diagonal.default"),
    *(
        "aten.sym_numel.default",
        "aten.view_as_real.default",
        "aten.view_as_complex.default",
        "aten.resolve_neg.default",
    ),
    *("aten.to.dtype", "aten.to.device", "aten.to.dtype_layout", "aten.to.other", "aten._to_copy.default"),
    *(
        "aten.type_as.default",
        "aten.mT.default",
        "aten.mH.default",
        "aten.matrix_H.default",
        "aten.adjoint.default",
        "aten.numpy_T.default",
        "aten.meshgrid.indexing",
        "aten.item.default",
    ),
    *("aten.repeat_interleave.self_int", "aten.repeat_interleave.self_Tensor", "aten.repeat_interleave.Tensor"),
    *("aten.expand_copy.default", "aten.slice_scatter.default", "aten.select_scatter.default", "aten.rot90.default"),
    *("aten.upsample_nearest2d.vec", "aten._local_scalar_dense.default", "aten.cumsum.default", "aten.unfold.default"),
)

_INDEXING = (
    *_aten("default", "gather index_select take_along_dim masked_select one_hot nonzero"),
    *("aten.index.Tensor", "aten.scatter.src", "aten.scatter.value", "aten.scatter_add.default"),
    *("aten.scatter_reduce.two", "aten.index_put.default", "aten.index_add.default", "aten.index_copy.default"),
    *("aten.index_fill.int_Scalar", "aten.masked_scatter.default", "aten.take.default", "aten.isin.Tensor_Tensor"),
    *("aten.bucketize.Tensor", "aten.searchsorted.Tensor", "aten.bincount.default", "aten.unique_consecutive.default"),
)

_MADE = (
    *_aten("default", "zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full eye arange linspace"),
    *_aten("default", "scalar_tensor logspace tril_indices triu_indices"),
    *("aten.arange.start", "aten.arange.start_step", "aten.eye.m"),
)

_WRITING = (
    *_aten("Tensor", "add_ sub_ mul_ div_ fill_ bitwise_and_ bitwise_or_ lerp_"),
    *_aten("Scalar", "add_ sub_ mul_ div_ fill_ lerp_"),
    *_aten("default", "copy_ detach_ zero_ clamp_ clamp_min_ clamp_max_ neg_ exp_ sqrt_ relu_ sigmoid_ tanh_"),
    *("aten.masked_fill_.Scalar", "aten.masked_fill_.Tensor", "aten.index_put_.default", "aten.scatter_.src"),
    *("aten.scatter_.value", "aten.scatter_add_.default", "aten.index_fill_.int_Scalar", "aten.index_add_.default"),
    *("aten.index_copy_.default", "aten.addcmul_.default", "aten.addcdiv_.default", "aten.pow_.Scalar", "aten.div.out"),
)

OPERATORS = frozenset((*RANDOM, *_POINTWISE, *_REDUCTIONS, *_LAYERS, *_LOSSES, *_VIEWS, *_INDEXING, *_MADE, *_WRITING))
"""Operators of torch."""

ALLOWED = OPERATORS | {*HOUSE, *SCOPES, *PYTHON}
"""Every operation that a graph as data may contain."""
