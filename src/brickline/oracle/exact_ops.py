"""Operations that compute nothing: they move, choose, compare, count, or are random by design."""

from __future__ import annotations

from typing import Any

from brickline.oracle.bounds import Kind, kind
from brickline.oracle.calls import Call, exact_form

kind(
    Kind.EXACT,
    """abs adaptive_max_pool1d alias all amax amin aminmax any as_strided as_strided_copy
    as_strided_scatter _assert_async _assert_scalar bitwise_and bitwise_left_shift bitwise_not
    bitwise_or bitwise_right_shift bitwise_xor bucketize cat ceil clamp clamp_max clamp_min clone
    complex concat conj _conj _conj_physical conj_physical constant_pad_nd contiguous copy
    copysign count_nonzero detach diag diag_embed diagonal diagonal_backward diagonal_copy
    diagonal_scatter embedding eq equal expand expand_copy eye fill flip floor fmax fmin
    fractional_max_pool2d full full_like gather ge gt hardshrink hardtanh hardtanh_backward
    heaviside im2col imag index index_copy index_fill index_select is_nonzero isfinite isin isinf
    isnan isneginf isposinf isreal item le lift lift_fresh lift_fresh_copy _local_scalar_dense
    logical_and logical_not logical_or logical_xor lt masked_fill masked_scatter masked_select
    max_pool1d max_pool2d maximum minimum movedim nan_to_num narrow narrow_copy ne neg new_full
    new_ones new_zeros nonzero nonzero_static one_hot ones ones_like _pack_padded_sequence permute
    permute_copy pixel_shuffle pixel_unshuffle positive real reflection_pad1d reflection_pad2d
    reflection_pad3d relu relu6 repeat repeat_interleave replication_pad1d replication_pad2d
    replication_pad3d reshape _reshape_alias resolve_conj resolve_neg roll rot90 round
    scalar_tensor searchsorted select select_backward select_copy select_scatter sgn sign signbit
    slice slice_backward slice_copy slice_scatter split split_copy split_with_sizes
    split_with_sizes_copy squeeze stack t take threshold threshold_backward to _to_copy transpose
    tril tril_indices triu triu_indices trunc unbind unfold unfold_copy _unique2
    unique_consecutive unique_dim _unsafe_index unsafe_split unsafe_split_with_sizes _unsafe_view
    unsqueeze unsqueeze_copy upsample_nearest1d upsample_nearest2d upsample_nearest3d
    _upsample_nearest_exact1d _upsample_nearest_exact2d view view_as_complex view_as_complex_copy
    view_as_real view_as_real_copy view_copy where zero zeros zeros_like""",
)
kind(
    Kind.CHOICE,
    """adaptive_max_pool2d adaptive_max_pool3d argmax argmin argsort cummax cummin kthvalue max
    max_pool2d_with_indices max_pool3d_with_indices median min mode msort nanmedian sort topk""",
)
kind(
    Kind.RANDOM,
    """bernoulli dropout native_dropout feature_dropout alpha_dropout _fused_dropout rand
    rand_like randn randn_like randint randint_like randperm normal uniform
    multinomial exponential geometric cauchy log_normal random poisson binomial
    rrelu_with_noise _standard_gamma _sample_dirichlet normal_functional""",
)
kind(
    Kind.UNWRITTEN,
    """empty empty_permuted empty_like empty_strided new_empty new_empty_strided resize resize_as
    set
    _empty_affine_quantized""",
)


@exact_form("embedding")
def _embedding(call: Call) -> list[Any]:
    """Widen the rows that are read, not the table."""
    table, indices = call.get("weight"), call.get("indices")
    rows = table.index_select(0, indices.reshape(-1).long()).double()
    return [rows.reshape(*indices.shape, table.shape[-1])]
