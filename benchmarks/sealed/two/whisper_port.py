"""Whisper as OpenAI's code has it, with caches inside the attentions."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

MELS, FRAMES, STATE, HEADS, LAYERS = 16, 40, 48, 4, 3
VOCABULARY, CONTEXT, EPS = 120, 24, 1e-5


class LayerNorm(nn.LayerNorm):
    """Norm in float32."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x normed."""
        wide = torch.promote_types(x.dtype, torch.float32)
        weight, bias = self.weight.to(wide), self.bias.to(wide)
        return F.layer_norm(x.to(wide), self.normalized_shape, weight, bias, self.eps).to(x.dtype)


def sinusoids(length: int, channels: int, max_timescale: float = 10000.0) -> Tensor:
    """Return sines, then cosines, of positions."""
    increment = math.log(max_timescale) / (channels // 2 - 1)
    scales = torch.exp(-increment * torch.arange(channels // 2).float())
    angles = torch.arange(length).float()[:, None] * scales[None]
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class MultiHeadAttention(nn.Module):
    """Attention over itself or over audio; keeps keys and values for later steps."""

    def __init__(self, cross: bool = False, cached: bool = False) -> None:
        super().__init__()
        self.cross, self.cached, self.n_head = cross, cached, HEADS
        self.query = nn.Linear(STATE, STATE)
        self.key = nn.Linear(STATE, STATE, bias=False)
        self.value = nn.Linear(STATE, STATE)
        self.out = nn.Linear(STATE, STATE)
        self.kept: tuple[Tensor, Tensor] | None = None

    def heads(self, x: Tensor) -> Tensor:
        """Return x with its heads second."""
        return x.view(*x.shape[:2], self.n_head, -1).permute(0, 2, 1, 3)

    def fresh(self, start: int) -> bool:
        """Tell whether what is kept is of an earlier text."""
        return start == 0

    def keys_values(self, x: Tensor, xa: Tensor | None, start: int) -> tuple[Tensor, Tensor]:
        """Return all keys and values the queries may see."""
        if not self.cached:
            return self.key(x), self.value(x)
        if self.fresh(start):
            self.kept = None
        if self.cross:
            if self.kept is None:
                self.kept = self.key(xa), self.value(xa)
        else:
            new = self.key(x), self.value(x)
            if self.kept is not None:
                new = torch.cat((self.kept[0], new[0]), 1), torch.cat((self.kept[1], new[1]), 1)
            self.kept = new
        return self.kept

    def forward(
        self, x: Tensor, xa: Tensor | None = None, mask: Tensor | None = None, start: int = 0
    ) -> Tensor:
        """Return what attention adds to the residual."""
        q = self.heads(self.query(x))
        k, v = (self.heads(each) for each in self.keys_values(x, xa, start))
        mixed = self.qkv_attention(q, k, v, mask)
        return self.out(mixed.permute(0, 2, 1, 3).flatten(start_dim=2))

    def qkv_attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Return the mixed values of each head."""
        scale = q.shape[-1] ** -0.25
        wide = torch.promote_types(q.dtype, torch.float32)
        qk = (q.to(wide) * scale) @ (k.to(wide) * scale).transpose(2, 3)
        if mask is not None:
            qk = qk + mask
        return F.softmax(qk, dim=-1).to(q.dtype) @ v


class ResidualAttentionBlock(nn.Module):
    """Attention, attention over audio in the decoder, feed-forward."""

    def __init__(self, cross: bool) -> None:
        super().__init__()
        self.attn = MultiHeadAttention(cached=cross)
        self.attn_ln = LayerNorm(STATE)
        self.cross_attn = MultiHeadAttention(cross=True, cached=True) if cross else None
        self.cross_attn_ln = LayerNorm(STATE) if cross else None
        self.mlp = nn.Sequential(
            nn.Linear(STATE, 4 * STATE), nn.GELU(), nn.Linear(4 * STATE, STATE)
        )
        self.mlp_ln = LayerNorm(STATE)

    def forward(
        self, x: Tensor, xa: Tensor | None = None, mask: Tensor | None = None, start: int = 0
    ) -> Tensor:
        """Return the new residual."""
        x = x + self.attn(self.attn_ln(x), mask=mask, start=start)
        if self.cross_attn is not None:
            x = x + self.cross_attn(self.cross_attn_ln(x), xa, start=start)
        return x + self.mlp(self.mlp_ln(x))


class AudioEncoder(nn.Module):
    """Turns a spectrogram into audio features."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(MELS, STATE, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(STATE, STATE, kernel_size=3, stride=2, padding=1)
        self.register_buffer("positional_embedding", sinusoids(FRAMES // 2, STATE))
        self.blocks = nn.ModuleList(ResidualAttentionBlock(cross=False) for _ in range(LAYERS))
        self.ln_post = LayerNorm(STATE)

    def stem(self, x: Tensor) -> Tensor:
        """Return what the convolutions make of a spectrogram, with channels last."""
        return F.gelu(self.conv2(F.gelu(self.conv1(x)))).permute(0, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return audio features."""
        x = self.stem(x)
        x = (x + self.positional_embedding).to(x.dtype)
        for block in self.blocks:
            x = block(x)
        return self.ln_post(x)


class TextDecoder(nn.Module):
    """Turns tokens and audio features into logits."""

    def __init__(self) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, STATE)
        self.positional_embedding = nn.Parameter(torch.empty(CONTEXT, STATE))
        self.blocks = nn.ModuleList(ResidualAttentionBlock(cross=True) for _ in range(LAYERS))
        self.ln = LayerNorm(STATE)
        mask = torch.full((CONTEXT, CONTEXT), float("-inf")).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def positions(self, start: int, length: int) -> Tensor:
        """Return the vectors of the positions of a chunk."""
        return self.positional_embedding[start : start + length]

    def forward(self, tokens: Tensor, xa: Tensor, start: int = 0) -> Tensor:
        """Return the logits of a chunk of tokens."""
        length = tokens.shape[1]
        x = self.token_embedding(tokens) + self.positions(start, length)
        mask = self.mask[start : start + length, : start + length]
        for block in self.blocks:
            x = block(x, xa, mask=mask, start=start)
        return (self.ln(x) @ self.token_embedding.weight.t()).float()


class Whisper(nn.Module):
    """Encoder and decoder; reads the audio when a text starts."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = AudioEncoder()
        self.decoder = TextDecoder()
        self.features: Tensor | None = None

    def forward(self, mel: Tensor, tokens: Tensor, start: int = 0) -> Tensor:
        """Return the logits of a chunk of tokens."""
        if start == 0:
            self.features = self.encoder(mel.to(self.encoder.conv1.weight.dtype))
        return self.decoder(tokens, self.features, start)


def converted(state: dict[str, Tensor]) -> Whisper:
    """Return OpenAI's model with the weights of transformers'."""
    names = {"layers": "blocks", "fc1": "mlp.0", "fc2": "mlp.2", "final_layer_norm": "mlp_ln"}
    names |= {"self_attn": "attn", "encoder_attn": "cross_attn", "self_attn_layer_norm": "attn_ln"}
    names |= {"encoder_attn_layer_norm": "cross_attn_ln", "embed_tokens": "token_embedding"}
    names |= {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "out"}
    model, renamed = Whisper(), {}
    for name, weight in state.items():
        if name == "proj_out.weight":
            continue
        parts = [names.get(part, part) for part in name.removeprefix("model.").split(".")]
        name = ".".join(parts).replace("embed_positions.weight", "positional_embedding")
        name = name.replace("encoder.layer_norm", "encoder.ln_post")
        renamed[name.replace("decoder.layer_norm", "decoder.ln")] = weight.clone()
    model.load_state_dict(renamed)
    return model
