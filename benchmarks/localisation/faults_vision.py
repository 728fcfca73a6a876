"""Faults of convolutions, their norms, and a vision transformer."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from localisation import drives, models
from localisation.planting import change, fault, on_output

convnet, vit = models.convnet, models.vit
PICTURE = drives.picture


# --- Convolutions ---------------------------------------------------------------------------------


@fault(convnet, "stage1.0.dwconv", "conv layers", run=PICTURE)
def padding_repeats_the_border(module, root):
    def forward(self, forward, x):
        wide = F.pad(x, (1, 1, 1, 1), mode="replicate")
        return F.conv2d(wide, self.weight, self.bias, groups=self.groups)

    change(module, forward=forward)


@fault(convnet, "stem.0", "conv layers", run=PICTURE)
def stride_starts_one_late(module, root):
    def forward(self, forward, x):
        return F.conv2d(x, self.weight, self.bias, padding=1)[:, :, 1::2, 1::2]

    change(module, forward=forward)


@fault(convnet, "down", "conv layers", run=PICTURE)
def conv_bias_missing(module, root):
    module.bias.data.zero_()


@fault(convnet, "stage1.1.dwconv", "conv layers", run=PICTURE)
def kernel_flipped(module, root):
    module.weight.data = module.weight.data.flip(-1)


@fault(convnet, "stage2.0.pwconv1", "conv layers", run=PICTURE)
def channels_rotated(module, root):
    change(module, forward=lambda self, forward, x: forward(x.roll(1, 1)))


@fault(convnet, "down", "conv layers", run=PICTURE)
def kernel_transposed(module, root):
    module.weight.data = module.weight.data.transpose(2, 3).contiguous()


# --- Norms and pooling ----------------------------------------------------------------------------


@fault(convnet, "bn", "norm layers", run=PICTURE)
def batch_norm_eps(module, root):
    module.eps = 1e-3


@fault(convnet, "stem.1", "norm layers", run=PICTURE)
def batch_norm_left_training(module, root):
    module.train()
    module.track_running_stats = False
    module.running_mean = module.running_var = None


@fault(convnet, "bn", "norm layers", run=PICTURE)
def running_mean_unset(module, root):
    module.running_mean.zero_()


@fault(convnet, "stage1.0.norm", "norm layers", run=PICTURE)
def group_norm_without_weight(module, root):
    module.weight.data.fill_(1)


@fault(convnet, "stage1.1.norm", "norm layers", run=PICTURE)
def wrong_number_of_groups(module, root):
    module.num_groups = 8


@fault(convnet, "pool", "conv layers", run=PICTURE)
def pooling_counts_the_padding(module, root):
    module.count_include_pad = True


@fault(convnet, "stage2.0.squeeze", "conv layers", run=PICTURE)
def squeeze_by_the_maximum(module, root):
    change(module, pooled=lambda self, pooled, x: x.amax((2, 3)))


@fault(convnet, "stage2.0", "residuals", run=PICTURE)
def conv_residual_missing(module, root):
    change(module, add=lambda self, add, x, out: out)


@fault(convnet, "", "residuals", run=PICTURE)
def head_pools_one_row_short(module, root):
    def forward(self, forward, image):
        x = self.stage1(self.stem(image))
        x = self.stage2(self.pool(self.bn(self.down(x))))
        return self.head(x[:, :, :-1].mean((2, 3)))

    change(module, forward=forward)


# --- Vision transformer ---------------------------------------------------------------------------


@fault(vit, "", "residuals", run=PICTURE)
def places_one_late(module, root):
    change(module, placed=lambda self, placed, x: x + self.places.roll(1, 1))


@fault(vit, "blocks.1.norm1", "eps", run=PICTURE)
def vit_eps(module, root):
    module.eps = 1e-3


@fault(vit, "blocks.0.attn", "attention scale", run=PICTURE)
def vit_scale_missing(module, root):
    change(module, attend=lambda self, attend, q, k, v: (q @ k.transpose(2, 3)).softmax(-1) @ v)


@fault(vit, "blocks.1", "residuals", run=PICTURE)
def layer_scale_ignored(module, root):
    change(module, add=lambda self, add, x, out, gamma: x + out)


@fault(vit, "blocks.0.mlp.1", "activations", run=PICTURE)
def vit_tanh_gelu(module, root):
    module.approximate = "tanh"


@fault(vit, "patch_embed", "conv layers", run=PICTURE)
def patches_transposed(module, root):
    on_output(module, lambda out: out.transpose(2, 3))


@fault(vit, "head", "stale rows", run=PICTURE)
def second_image_gets_the_first_ones_answer(module, root):
    on_output(module, lambda out: torch.cat([out[:1], out[:1]]))
