"""The decoder of Whisper, token by token: it keeps its keys, and those of what was heard.

The model grows what it keeps; its port has buffers of full length and one product for each input.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import drives, models
from localisation.copies import linear, norm_like
from localisation.planting import change
from localisation.unseen_fifth import BOTH, fifth, harmless
from localisation.unseen_fourth_pairs import same

DIM, LONGEST, PROMPT, STEPS = 48, 20, 4, 5


def dictated(dtype: torch.dtype) -> drives.Run:
    """A prompt of four tokens, then five tokens one by one, about the same sound."""
    given = drives.tokens(56, length=PROMPT + STEPS)
    generator = torch.Generator().manual_seed(2056)
    sound = torch.randn(2, 10, DIM, generator=generator).to(dtype)

    def drive(model: nn.Module) -> list[Tensor]:
        model.reset()
        with torch.no_grad():
            out = [model(given[:, :PROMPT], sound)]
            for at in range(PROMPT, PROMPT + STEPS):
                out.append(model(given[:, at : at + 1], sound))
        return out

    return drives.Run(drive=drive)


class WhisperAttention(nn.Module):
    """Keys have no bias; those of another input are made once."""

    state = ("keys", "values")

    def __init__(self, crossed: bool) -> None:
        super().__init__()
        self.crossed, self.scaling = crossed, 12**-0.5
        self.k_proj = nn.Linear(DIM, DIM, bias=False)
        self.q_proj, self.v_proj, self.out_proj = (nn.Linear(DIM, DIM) for _ in range(3))
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def forward(self, x: Tensor, of: Tensor) -> Tensor:
        q = (self.q_proj(x) * self.scaling).unflatten(-1, (4, 12)).transpose(1, 2)
        if not self.crossed or self.keys is None:
            k, v = (
                f(of).unflatten(-1, (4, 12)).transpose(1, 2) for f in (self.k_proj, self.v_proj)
            )
            self.keep(k, v)
        scores = q @ self.keys.transpose(2, 3)
        if not self.crossed:
            scores = scores + self.mask(x.shape[1], self.keys.shape[2]).to(x.dtype)
        seen = scores.softmax(-1) @ self.values
        return self.out_proj(seen.transpose(1, 2).flatten(2))

    def keep(self, k: Tensor, v: Tensor) -> None:
        old = self.keys is not None
        self.keys = torch.cat((self.keys, k), 2) if old else k
        self.values = torch.cat((self.values, v), 2) if old else v

    def mask(self, new: int, length: int) -> Tensor:
        return torch.full((new, length), -torch.inf).triu(length - new + 1)


class WhisperDecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.encoder_attn = WhisperAttention(False), WhisperAttention(True)
        self.self_attn_layer_norm, self.encoder_attn_layer_norm, self.final_layer_norm = (
            nn.LayerNorm(DIM) for _ in range(3)
        )
        self.fc1, self.fc2 = nn.Linear(DIM, 96), nn.Linear(96, DIM)

    def forward(self, x: Tensor, sound: Tensor) -> Tensor:
        h = self.self_attn_layer_norm(x)
        x = x + self.self_attn(h, h)
        x = x + self.encoder_attn(self.encoder_attn_layer_norm(x), sound)
        return x + self.fc2(F.gelu(self.fc1(self.final_layer_norm(x))))


class WhisperDecoder(nn.Module):
    state = ("past",)

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.embed_positions = nn.Embedding(101, DIM), nn.Embedding(LONGEST, DIM)
        self.layers = nn.ModuleList(WhisperDecoderLayer() for _ in range(2))
        self.layer_norm, self.past = nn.LayerNorm(DIM), 0

    def reset(self) -> None:
        self.past = 0
        for module in self.modules():
            if isinstance(module, WhisperAttention):
                module.keys = module.values = None

    def forward(self, tokens: Tensor, sound: Tensor) -> Tensor:
        places = torch.arange(self.past, self.past + tokens.shape[1])
        x = self.embed_tokens(tokens) + self.embed_positions(places)
        self.past += tokens.shape[1]
        for layer in self.layers:
            x = layer(x, sound)
        return F.linear(self.layer_norm(x), self.embed_tokens.weight)


def whisper_decoder(*, outliers: bool = False) -> nn.Module:
    model = models.weigh(WhisperDecoder(), 509, outliers)
    model.embed_tokens.weight.data *= 0.5
    return model


class Kept(nn.Module):
    """Attention to what was said, in buffers of full length."""

    state = ("k", "v")

    def __init__(self, of: WhisperAttention) -> None:
        super().__init__()
        bias = torch.cat((of.q_proj.bias, torch.zeros(DIM), of.v_proj.bias)).detach()
        self.qkv = linear(of.q_proj.weight, of.k_proj.weight, of.v_proj.weight, bias=bias)
        self.out = same(of.out_proj)
        self.register_buffer("k", torch.zeros(2, LONGEST, 4, 12))
        self.register_buffer("v", torch.zeros(2, LONGEST, 4, 12))

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 12)).unbind(2)
        slots = self.slots(places)
        self.k[:, slots], self.v[:, slots] = k, v
        scores = torch.einsum("bqhd,bkhd->bhqk", q, self.k) * 12**-0.5
        weights = scores.masked_fill(self.hidden(places), -torch.inf).softmax(-1)
        return self.out(torch.einsum("bhqk,bkhd->bqhd", weights, self.v).flatten(2))

    def slots(self, places: Tensor) -> Tensor:
        return places

    def hidden(self, places: Tensor) -> Tensor:
        return torch.arange(LONGEST) > places[:, None]


class Heard(nn.Module):
    """Attention to what was heard; the scale is in the weights."""

    def __init__(self, of: WhisperAttention) -> None:
        super().__init__()
        self.q = linear(of.q_proj.weight * of.scaling, bias=of.q_proj.bias.detach() * of.scaling)
        self.k, self.v, self.out = linear(of.k_proj.weight), same(of.v_proj), same(of.out_proj)

    def forward(self, x: Tensor, sound: Tensor) -> Tensor:
        q, k, v = (
            f(e).unflatten(-1, (4, 12)).transpose(1, 2)
            for f, e in ((self.q, x), (self.k, sound), (self.v, sound))
        )
        return self.out(self.looked(q, k, v).transpose(1, 2).flatten(2))

    def looked(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, scale=1.0)


class SaidBlock(nn.Module):
    def __init__(self, of: WhisperDecoderLayer) -> None:
        super().__init__()
        self.said, self.heard = Kept(of.self_attn), Heard(of.encoder_attn)
        self.ln1, self.ln2, self.ln3 = map(
            norm_like, (of.self_attn_layer_norm, of.encoder_attn_layer_norm, of.final_layer_norm)
        )
        self.mlp = nn.Sequential(same(of.fc1), nn.GELU(), same(of.fc2))

    def forward(self, x: Tensor, places: Tensor, sound: Tensor) -> Tensor:
        x = x + self.said(self.ln1(x), places)
        x = self.told(x, sound)
        return x + self.mlp(self.ln3(x))

    def told(self, x: Tensor, sound: Tensor) -> Tensor:
        return x + self.heard(self.ln2(x), sound)


class BufferedWhisper(nn.Module):
    state = ("length",)

    def __init__(self, model: WhisperDecoder) -> None:
        super().__init__()
        self.table = nn.Parameter(model.embed_tokens.weight.detach().clone())
        self.wpe = nn.Embedding.from_pretrained(model.embed_positions.weight.detach().clone())
        self.blocks, self.ln = (
            nn.ModuleList(map(SaidBlock, model.layers)),
            norm_like(model.layer_norm),
        )
        self.length = 0

    def reset(self) -> None:
        self.length = 0
        for block in self.blocks:
            block.said.k.zero_()
            block.said.v.zero_()

    def forward(self, tokens: Tensor, sound: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1]) + self.length
        self.length += tokens.shape[1]
        x = F.embedding(tokens, self.table) + self.wpe(self.placed(places))
        for block in self.blocks:
            x = block(x, places, sound)
        return self.ln(x) @ self.table.T

    def placed(self, places: Tensor) -> Tensor:
        return places


def said(path, kind, **more):
    """Declare a fault of the decoder."""
    return fifth(whisper_decoder, path, kind, run=dictated, **more)


@said("", "positions", port=BufferedWhisper, position=1, regimes=BOTH)
def whisper_places_start_anew(module, root):
    change(module, placed=lambda self, placed, places: torch.arange(len(places)))


@said("", "positions", port=BufferedWhisper)
def whisper_places_as_in_bart(module, root):
    change(module, placed=lambda self, placed, places: places + 2)


@said("blocks.1.said", "caches", port=BufferedWhisper, position=1, regimes=BOTH)
def whisper_slot_of_the_last_token(module, root):
    def slots(self, slots, places):
        return places if len(places) > 1 else places - 1

    change(module, slots=slots)


@said("blocks.0.said", "masks", port=BufferedWhisper, position=1)
def whisper_empty_slots_are_seen(module, root):
    def hidden(self, hidden, places):
        return hidden(places) if len(places) > 1 else hidden(places + 2)

    change(module, hidden=hidden)


@said("blocks.0.said", "masks", port=BufferedWhisper)
def whisper_prompt_sees_what_follows(module, root):
    change(module, hidden=lambda self, hidden, places: hidden(places[-1:]))


@said("blocks.1.said.qkv", "weights", port=BufferedWhisper)
def whisper_bias_of_values_at_keys(module, root):
    module.bias.data[DIM:] = module.bias.data[DIM:].roll(DIM)


@said("blocks.1.heard", "scale", port=BufferedWhisper, regimes=BOTH)
def whisper_scaled_twice(module, root):
    change(module, looked=lambda self, looked, *qkv: F.scaled_dot_product_attention(*qkv))


@said("blocks.0.heard", "masks", port=BufferedWhisper)
def whisper_sound_is_causal(module, root):
    def looked(self, looked, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, scale=1.0, is_causal=True)

    change(module, looked=looked)


@said("blocks.0", "norm layers", port=BufferedWhisper)
def whisper_sound_without_its_norm(module, root):
    change(module, told=lambda self, told, x, sound: x + self.heard(x, sound))


@said("layers.1.self_attn", "caches", against=BufferedWhisper, position=2)
def whisper_last_key_forgotten(module, root):
    def keep(self, keep, k, v):
        if self.keys is not None and self.keys.shape[2] > PROMPT:
            self.keys, self.values = self.keys[:, :, :-1], self.values[:, :, :-1]
        keep(k, v)

    change(module, keep=keep)


@said("layers.0.encoder_attn", "caches", against=BufferedWhisper, position=0)
def whisper_heads_of_sound_not_moved(module, root):
    def keep(self, keep, k, v):
        keep(k.transpose(1, 2).reshape(k.shape), v)

    change(module, keep=keep)


harmless("whisper buffered", whisper_decoder, "same", "bf16", port=BufferedWhisper, run=dictated)
harmless("whisper against buffered", whisper_decoder, "same", against=BufferedWhisper, run=dictated)
