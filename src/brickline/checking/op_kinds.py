"""Which operations make a value of their own, which only take a shape, and which multiply."""

from __future__ import annotations

PASSING = frozenset(
    {
        "aten::_to_copy",
        "aten::clone",
        "aten::copy_",
        "aten::detach",
        "aten::detach_",
        "aten::lift_fresh",
        "aten::lift_fresh_copy",
        "aten::alias",
        "aten::_unsafe_view",
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::_local_scalar_dense",
        "aten::resize_",
        "aten::set_",
        "aten::_reshape_alias",
        "aten::view_copy",
        "aten::_reshape_copy",
    }
)
"""Operations that make no value of their own."""
SHAPED = frozenset(
    {
        "aten::empty_like",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::zeros_like",
        "aten::ones_like",
        "aten::full_like",
        "aten::new_zeros",
        "aten::new_ones",
        "aten::new_full",
        "aten::rand_like",
        "aten::randn_like",
    }
)
"""Operations that take nothing but the shape from their argument."""
CREATING = SHAPED | {
    "aten::arange",
    "aten::eye",
    "aten::full",
    "aten::linspace",
    "aten::ones",
    "aten::scalar_tensor",
    "aten::zeros",
}
"""Operations that make something from nothing."""
CONTRACTIONS = {
    "aten::mm": 0,
    "aten::addmm": 1,
    "aten::bmm": 0,
    "aten::linear": 0,
    "aten::convolution": 0,
    "aten::_convolution": 0,
    "aten::baddbmm": 1,
    "aten::addmv": 1,
    "aten::mv": 0,
}
"""Operations that multiply with a weight, and which argument usually is not the weight."""
POINTWISE = frozenset(
    {
        "aten::abs",
        "aten::add",
        "aten::clamp",
        "aten::div",
        "aten::elu",
        "aten::exp",
        "aten::expm1",
        "aten::gelu",
        "aten::leaky_relu",
        "aten::log",
        "aten::masked_fill",
        "aten::maximum",
        "aten::minimum",
        "aten::mul",
        "aten::neg",
        "aten::pow",
        "aten::relu",
        "aten::rsqrt",
        "aten::rsub",
        "aten::sigmoid",
        "aten::silu",
        "aten::softplus",
        "aten::sqrt",
        "aten::sub",
        "aten::tanh",
        "aten::where",
    }
)
"""Operations that make at least as many numbers as they read of any one tensor."""
