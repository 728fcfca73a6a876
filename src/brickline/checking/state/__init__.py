"""Are the weights and buffers of both sides the same, up to layout, folding, rounding and grids?"""
