"""CLIP of open_clip, both towers, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from transformers import CLIPConfig, CLIPModel

from sealed.cases import Case, Pair
from sealed.two.common import (
    Edit,
    Family,
    both,
    copied,
    exchanged,
    finish,
    noise,
    paths,
    randomise,
    recode,
    replaced,
    reweighed,
    rounded,
    scaled_row,
    setting,
    tokens,
    zeroed,
)
from sealed.two.packages import open_clip
from sealed.two.packages import open_clip_blocks as blocks

EMBED, WIDTH, TEXT_WIDTH, HEAD, LAYERS, SIDE, PATCH = 48, 64, 48, 16, 3, 24, 6
VOCABULARY, CONTEXT = 130, 12
VISUAL, TEXT = "clip.visual.transformer.resblocks.{}", "clip.transformer.resblocks.{}"


class Towers(nn.Module):
    """open_clip's model, fed images of any dtype."""

    def __init__(self, clip: nn.Module) -> None:
        super().__init__()
        self.clip = clip

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the features of images and of texts, and their logits."""
        images, texts, scale = self.clip(image.to(self.clip.visual.conv1.weight.dtype), text)
        return images, texts, scale * images @ texts.t()


class Reference(nn.Module):
    """transformers' CLIP with plain outputs."""

    def __init__(self, model: CLIPModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the features of images and of texts, and their logits."""
        output = self.model(input_ids=text, pixel_values=image)
        return output.image_embeds, output.text_embeds, output.logits_per_image


def converted(state: dict[str, Tensor], custom: bool) -> Towers:
    """Return open_clip's model with the weights of transformers'."""
    block_type = "custom" if custom else None
    clip = open_clip.CLIP(
        EMBED,
        open_clip.CLIPVisionCfg(
            layers=LAYERS,
            width=WIDTH,
            head_width=HEAD,
            mlp_ratio=2.0,
            patch_size=PATCH,
            image_size=SIDE,
            block_type=block_type,
        ),
        open_clip.CLIPTextCfg(
            context_length=CONTEXT,
            vocab_size=VOCABULARY,
            width=TEXT_WIDTH,
            heads=TEXT_WIDTH // HEAD,
            layers=LAYERS,
            mlp_ratio=2.0,
            block_type=block_type,
        ),
        quick_gelu=True,
    )
    renamed: dict[str, Tensor] = {
        "logit_scale": state["logit_scale"],
        "text_projection": state["text_projection.weight"].t(),
        "visual.proj": state["visual_projection.weight"].t(),
        "visual.class_embedding": state["vision_model.embeddings.class_embedding"],
        "visual.positional_embedding": state["vision_model.embeddings.position_embedding.weight"],
        "visual.conv1.weight": state["vision_model.embeddings.patch_embedding.weight"],
        "positional_embedding": state["text_model.embeddings.position_embedding.weight"],
        "token_embedding.weight": state["text_model.embeddings.token_embedding.weight"],
    }
    inside = {"layer_norm1": "ln_1", "layer_norm2": "ln_2", "self_attn.out_proj": "attn.out_proj"}
    inside |= {"mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"}
    for kind in ("weight", "bias"):
        for old, new in (("vision_model.pre_layrnorm", "visual.ln_pre"),
                         ("vision_model.post_layernorm", "visual.ln_post"),
                         ("text_model.final_layer_norm", "ln_final")):  # fmt: skip
            renamed[f"{new}.{kind}"] = state[f"{old}.{kind}"]
        for old, new in (("vision_model", "visual."), ("text_model", "")):
            for index in range(LAYERS):
                source = f"{old}.encoder.layers.{index}"
                target = f"{new}transformer.resblocks.{index}"
                parts = [state[f"{source}.self_attn.{each}_proj.{kind}"] for each in "qkv"]
                renamed[f"{target}.attn.in_proj_{kind}"] = torch.cat(parts)
                for theirs, ours in inside.items():
                    renamed[f"{target}.{ours}.{kind}"] = state[f"{source}.{theirs}.{kind}"]
    clip.load_state_dict({name: each.clone() for name, each in renamed.items()})
    return Towers(clip)


def build(
    dtype: torch.dtype,
    edit: Edit | None,
    custom: bool = False,
    loud: float = 1.0,
    faint: bool = False,
) -> Pair:
    """Return open_clip's model against transformers'."""
    shared: dict[str, Any] = {"num_hidden_layers": LAYERS, "projection_dim": EMBED}
    config = CLIPConfig(
        text_config={
            "vocab_size": VOCABULARY,
            "hidden_size": TEXT_WIDTH,
            "intermediate_size": 2 * TEXT_WIDTH,
            "num_attention_heads": TEXT_WIDTH // HEAD,
            "max_position_embeddings": CONTEXT,
            "bos_token_id": VOCABULARY - 2,
            "eos_token_id": VOCABULARY - 1,
            **shared,
        },
        vision_config={
            "hidden_size": WIDTH,
            "intermediate_size": 2 * WIDTH,
            "num_attention_heads": WIDTH // HEAD,
            "image_size": SIDE,
            "patch_size": PATCH,
            **shared,
        },
        projection_dim=EMBED,
    )
    model = randomise(CLIPModel(config), 8, gain=1.2, embedding=0.5)
    model.logit_scale.data.fill_(1.25)
    model.visual_projection.weight.data *= loud
    if faint:  # little before the first norm
        for parameter in model.vision_model.embeddings.parameters():
            parameter.data *= 0.05
    rounded(model, dtype)
    candidate = converted(model.state_dict(), custom)
    candidate, reference = finish(candidate, Reference(model), dtype, edit)
    text = tokens(9, 3, CONTEXT, below=VOCABULARY - 1)
    for row, end in enumerate((11, 5, 8)):
        text[row, end] = VOCABULARY - 1
        text[row, end + 1 :] = 0
    return Pair(candidate, reference, (noise(10, 2, 3, SIDE, SIDE), text))


class _ClassLast(blocks.VisionTransformer):
    def _embeds(self, x: Tensor) -> Tensor:
        x = self.conv1(x).flatten(2).transpose(1, 2)
        x = torch.cat([x, self.class_embedding.expand(len(x), 1, -1)], dim=1)
        return self.ln_pre(x + self.positional_embedding)


class _ColumnsFirst(blocks.VisionTransformer):
    def _embeds(self, x: Tensor) -> Tensor:
        x = self.conv1(x).transpose(2, 3).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_embedding.expand(len(x), 1, -1), x], dim=1)
        return self.ln_pre(x + self.positional_embedding)


class _AveragedTokens(blocks.VisionTransformer):
    def _pool(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.ln_post(x)
        return x[:, 1:].mean(dim=1), x[:, 1:]


class _NoLastNorm(blocks.VisionTransformer):
    def _pool(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, 0], x[:, 1:]


class _PostNormBlock(blocks.ResidualAttentionBlock):
    def forward(
        self, q_x: Tensor, k_x: Any = None, v_x: Any = None, attn_mask: Tensor | None = None
    ) -> Tensor:
        x = q_x + self.attention(q_x=self.ln_1(q_x), attn_mask=attn_mask)
        return self.ln_2(x) + self.mlp(self.ln_2(x))


class _AttentionTwice(blocks.ResidualAttentionBlock):
    def forward(
        self, q_x: Tensor, k_x: Any = None, v_x: Any = None, attn_mask: Tensor | None = None
    ) -> Tensor:
        attended = self.attention(q_x=self.ln_1(q_x), attn_mask=attn_mask)
        x = q_x + attended
        return x + attended + self.mlp(self.ln_2(x))


class _ClassOnly(blocks.ResidualAttentionBlock):
    """Computes the class token only, as nobody reads the patches behind the last layer."""

    def forward(
        self, q_x: Tensor, k_x: Any = None, v_x: Any = None, attn_mask: Tensor | None = None
    ) -> Tensor:
        normed = self.ln_1(q_x)
        x = q_x[:, :1] + self.attention(q_x=normed[:, :1], k_x=normed, v_x=normed)
        return x + self.mlp(self.ln_2(x))


class _MaskForgotten(blocks.Attention):
    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        return super().forward(x, None)


class _SumOfHeads(blocks.Attention):
    """Writes attention out, and joins heads in the wrong order."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        size, length, width = x.shape
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        q, k, v = qkv.view(size, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)
        return self.out_proj(x.permute(0, 2, 3, 1).reshape(size, length, width))


class _LastToken(open_clip.CLIP):
    def encode_text(self, text: Tensor, normalize: bool = False) -> Tensor:
        x = self.token_embedding(text) + self.positional_embedding
        x = self.ln_final(self.transformer(x, attn_mask=self.attn_mask))
        x = x[:, -1] @ self.text_projection
        return F.normalize(x, dim=-1) if normalize else x


class _NormalizedOverBatch(open_clip.CLIP):
    def encode_text(self, text: Tensor, normalize: bool = False) -> Tensor:
        x = super().encode_text(text)
        return F.normalize(x, dim=0) if normalize else x


class _ScaleWithoutExp(open_clip.CLIP):
    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        images, texts, _ = super().forward(image, text)
        return images, texts, self.logit_scale


class _NarrowLength(open_clip.CLIP):
    def encode_image(self, image: Tensor, normalize: bool = False) -> Tensor:
        x = self.visual(image)
        return x / x.pow(2).sum(-1, keepdim=True).sqrt() if normalize else x


def _finite_mask(model: nn.Module) -> None:
    model.clip.attn_mask.clamp_(min=torch.finfo(torch.bfloat16).min)


def _fold_scale(model: nn.Module) -> None:
    """Scale queries by a power of two in the weights and divide the scores by as much."""
    for module in model.modules():
        if isinstance(module, blocks.Attention):
            width = module.in_proj_weight.shape[1]
            module.in_proj_weight[:width] *= 4
            module.in_proj_bias[:width] *= 4
            module.in_proj_weight[width : 2 * width] /= 4
            module.in_proj_bias[width : 2 * width] /= 4


def _exchange_queries_keys(tensor: Tensor) -> Tensor:
    q, k, v = tensor.chunk(3)
    return torch.cat((k, q, v))


def _transposed_grid(table: Tensor) -> Tensor:
    grid = table[1:].view(SIDE // PATCH, SIDE // PATCH, -1).transpose(0, 1)
    return torch.cat((table[:1], grid.reshape(-1, table.shape[1])))


def cases() -> Iterator[Case]:
    """Yield the cases of CLIP."""
    bf16, f16 = torch.bfloat16, torch.float16
    family = Family("clip", build)
    fault, harmless = family.fault, family.harmless
    activations = paths(VISUAL + ".mlp.gelu", LAYERS) + paths(TEXT + ".mlp.gelu", LAYERS)
    text_attentions = paths(TEXT + ".attn", LAYERS)
    visual_norms = paths(VISUAL + ".ln_1", LAYERS) + paths(VISUAL + ".ln_2", LAYERS)
    visual_norms += ("clip.visual.ln_pre", "clip.visual.ln_post")

    yield fault(
        "gelu-exact",
        replaced(lambda _: nn.GELU(), *activations),
        activations,
        "exact GELU instead of the quick one",
    )
    yield fault(
        "class-last", recode(_ClassLast, "clip.visual"), "clip.visual",
        "class token behind the patches",
    )  # fmt: skip
    yield fault(
        "patches-by-column",
        recode(_ColumnsFirst, "clip.visual"),
        "clip.visual",
        "patches numbered by column",
        dtype=bf16,
    )
    yield fault(
        "pooled-average", recode(_AveragedTokens, "clip.visual"), "clip.visual",
        "average of the patches instead of the class token",
    )  # fmt: skip
    yield fault(
        "ln-post-missing", recode(_NoLastNorm, "clip.visual"), "clip.visual",
        "last norm of the image tower forgotten", dtype=f16,
    )  # fmt: skip
    yield fault(
        "grid-transposed",
        reweighed("clip.visual", _transposed_grid, "positional_embedding"),
        "clip.visual",
        "position table resized with height and width exchanged",
    )
    yield fault(
        "text-last-token",
        recode(_LastToken, "clip"),
        "clip",
        "takes the last position instead of the end of the text",
    )
    yield fault(
        "text-mask-late",
        reweighed("clip", lambda mask: torch.full_like(mask, float("-inf")).triu(2), "attn_mask"),
        "clip",
        "causal mask lets the next token be seen",
    )
    yield fault(
        "text-mask-forgotten",
        recode(_MaskForgotten, text_attentions[1]),
        text_attentions[1],
        "attention of one text layer ignores the mask",
        custom=True,
        dtype=bf16,
    )
    yield fault(
        "heads-joined",
        recode(_SumOfHeads, VISUAL.format(1) + ".attn"),
        VISUAL.format(1) + ".attn",
        "heads joined with their features interleaved",
        custom=True,
    )
    yield fault(
        "heads-number",
        both(setting("num_heads", 6, *text_attentions), setting("head_dim", 8, *text_attentions)),
        text_attentions,
        "twice as many heads, each half as wide",
    )
    yield fault(
        "queries-keys-exchanged",
        both(
            reweighed(VISUAL.format(2) + ".attn", _exchange_queries_keys, "in_proj_weight"),
            reweighed(VISUAL.format(2) + ".attn", _exchange_queries_keys, "in_proj_bias"),
        ),
        VISUAL.format(2) + ".attn",
        "queries and keys exchanged when fused",
    )
    yield fault(
        "projection-transposed",
        reweighed("clip", Tensor.t, "text_projection"),
        "clip",
        "square projection of the text not transposed",
    )
    yield fault(
        "features-over-batch",
        recode(_NormalizedOverBatch, "clip"),
        "clip",
        "features normalised over the batch",
    )
    yield fault(
        "scale-without-exp", recode(_ScaleWithoutExp, "clip"), "clip",
        "logit scale is not exponentiated", dtype=f16,
    )  # fmt: skip
    yield fault(
        "eps",
        setting("eps", 1e-6, *visual_norms),
        visual_norms,
        "eps 1e-6 in the norms of the image tower, not 1e-5",
        faint=True,
    )
    yield fault(
        "residual-normed",
        recode(_PostNormBlock, TEXT.format(1)),
        TEXT.format(1),
        "residual of the feed-forward taken after the norm",
    )
    yield fault(
        "attention-twice",
        recode(_AttentionTwice, VISUAL.format(0)),
        VISUAL.format(0),
        "output of attention added twice",
        dtype=bf16,
    )
    yield fault(
        "norms-exchanged",
        exchanged(TEXT.format(2) + ".ln_1", TEXT.format(2) + ".ln_2"),
        (TEXT.format(2) + ".ln_1", TEXT.format(2) + ".ln_2"),
        "the two norms of a layer exchanged",
    )
    yield fault(
        "bias-dropped",
        zeroed(VISUAL.format(1) + ".mlp.c_fc"),
        VISUAL.format(1) + ".mlp.c_fc",
        "bias not converted",
        dtype=bf16,
    )
    yield fault(
        "c-proj-of-other-layer",
        copied(TEXT.format(2) + ".mlp.c_proj", TEXT.format(1) + ".mlp.c_proj"),
        TEXT.format(2) + ".mlp.c_proj",
        "weight of layer 1 loaded into layer 2",
    )
    yield fault(
        "c-fc-row",
        reweighed(VISUAL.format(2) + ".mlp.c_fc", scaled_row(33, 1.03)),
        VISUAL.format(2) + ".mlp.c_fc",
        "one row of a weight is 3 % too large",
    )
    yield fault(
        "length-overflows",
        recode(_NarrowLength, "clip"),
        "clip",
        "squares of the features overflow in half precision",
        dtype=f16,
        precision=True,
        loud=100.0,
    )

    yield harmless("clean")
    yield harmless("clean", dtype=bf16)
    yield harmless("clean-loud", dtype=f16, loud=100.0)
    yield harmless("custom-blocks", custom=True)
    yield harmless("class-token-only", recode(_ClassOnly, VISUAL.format(LAYERS - 1)))
    yield harmless("finite-mask", _finite_mask, custom=True, dtype=bf16)
    yield harmless("scale-moved", _fold_scale, custom=True, dtype=bf16)
    yield harmless("channels-last", lambda model: model.to(memory_format=torch.channels_last))
