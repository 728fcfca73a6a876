"""Models that scan over time: a selective state space, and a decaying average per channel.

The ports compute the scan as one product over all pairs of places.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import models
from localisation.copies import linear, norm_like
from localisation.planting import change, on_output
from localisation.unseen_ports import ALL, FP32, right, unseen

# --- A selective state space ----------------------------------------------------------------------


class Scanner(nn.Module):
    """Convolution, data-dependent steps, a scan in float32, a gate."""

    def __init__(self, dim: int, inner: int, state: int = 8, rank: int = 4, taps: int = 4) -> None:
        super().__init__()
        self.sizes = [rank, state, state]
        self.in_proj = nn.Linear(dim, 2 * inner, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, taps, groups=inner, padding=taps - 1)
        self.x_proj = nn.Linear(inner, rank + 2 * state, bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        self.A_log = nn.Parameter(torch.empty(inner, state))
        self.D = nn.Parameter(torch.empty(inner))
        self.out_proj = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h, gate = self.in_proj(x).chunk(2, -1)
        h = F.silu(self.causal(h))
        dt, b, c = self.x_proj(h).split(self.sizes, -1)
        y = self.scan(h, self.steps(self.dt_proj(dt)), b, c)
        return self.out_proj(self.gated(y, gate))

    def causal(self, h: Tensor) -> Tensor:
        return self.conv1d(h.mT)[..., : h.shape[1]].mT

    def steps(self, dt: Tensor) -> Tensor:
        return F.softplus(dt)

    def scan(self, h: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Tensor:
        rates = -torch.exp(self.A_log.float())
        wide = [each.float() for each in (h, dt, b, c)]
        u, dt, b, c = wide
        state = torch.zeros(*u.shape[::2], b.shape[-1], dtype=torch.float32)
        out = []
        for t in range(u.shape[1]):
            decay = torch.exp(dt[:, t, :, None] * rates)
            state = self.step(state, decay, (dt[:, t] * u[:, t])[..., None] * b[:, t, None])
            out.append((state * c[:, t, None]).sum(-1))
        return (torch.stack(out, 1) + self.skip(u)).to(h.dtype)

    def step(self, state: Tensor, decay: Tensor, new: Tensor) -> Tensor:
        return decay * state + new

    def skip(self, u: Tensor) -> Tensor:
        return u * self.D

    def gated(self, y: Tensor, gate: Tensor) -> Tensor:
        return y * F.silu(gate)


class ScanBlock(nn.Module):
    """Norm, scan, residual."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = models.RMSNorm(dim)
        self.mixer = Scanner(dim, 2 * dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(self.norm(x))


class Mamba(nn.Module):
    """Blocks of scans; the head is the embedding."""

    def __init__(self, dim: int = 40) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(101, dim)
        self.layers = nn.ModuleList(ScanBlock(dim) for _ in range(3))
        self.norm_f = models.RMSNorm(dim)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm_f(x), self.embeddings.weight)


def mamba(*, outliers: bool = False) -> nn.Module:
    return models.weigh(Mamba(), 61, outliers)


class PairScan(nn.Module):
    """The same scan over all pairs of places; weights transposed, taps by hand."""

    def __init__(self, block: ScanBlock) -> None:
        super().__init__()
        mixer = block.mixer
        first, second = mixer.in_proj.weight.detach().chunk(2)
        self.gain = nn.Parameter(block.norm.weight.detach().clone())
        self.w_u = nn.Parameter(first.T.contiguous())
        self.w_z = nn.Parameter(second.T.contiguous())
        self.taps = nn.Parameter(mixer.conv1d.weight.detach()[:, 0].T.contiguous())
        self.tap_bias = nn.Parameter(mixer.conv1d.bias.detach().clone())
        low, b, c = mixer.x_proj.weight.split(mixer.sizes)
        self.to_low, self.to_b, self.to_c = linear(low), linear(b), linear(c)
        self.to_step = linear(mixer.dt_proj.weight, bias=mixer.dt_proj.bias)
        self.rates = nn.Parameter(-mixer.A_log.detach().exp())
        self.through = nn.Parameter(mixer.D.detach().clone())
        self.last = linear(mixer.out_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = F.rms_norm(x, x.shape[-1:], self.gain, 1e-5)
        u, z = h @ self.w_u, h @ self.w_z
        u = F.silu(self.tapped(u))
        dt = F.softplus(self.to_step(self.to_low(u)))
        y = self.pairs(u.float(), dt.float(), self.to_b(u).float(), self.to_c(u).float())
        return self.last((y + u * self.through).to(x.dtype) * F.silu(z)) + x

    def tapped(self, u: Tensor) -> Tensor:
        wide = F.pad(u, (0, 0, len(self.taps) - 1, 0))
        parts = [wide[:, n : n + u.shape[1]] * tap for n, tap in enumerate(self.taps)]
        return torch.stack(parts).sum(0) + self.tap_bias

    def pairs(self, u: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Tensor:
        total = (dt[..., None] * self.rates.float()).cumsum(1)
        late = total[:, :, None] - total[:, None]
        decay = late.masked_fill(~self.past(u.shape[1])[:, :, None, None], float("-inf")).exp()
        return torch.einsum("btn,btsdn,bsd,bsn->btd", c, decay, dt * u, b)

    def past(self, length: int) -> Tensor:
        return torch.ones(length, length, dtype=torch.bool).tril()


class PairMamba(nn.Module):
    """The same with blocks of one module each."""

    def __init__(self, model: Mamba) -> None:
        super().__init__()
        self.words = nn.Parameter(model.embeddings.weight.detach().clone())
        self.backbone = nn.Sequential(*(PairScan(each) for each in model.layers))
        self.end = nn.RMSNorm(self.words.shape[1], eps=1e-5)
        self.end.weight = nn.Parameter(model.norm_f.weight.detach().clone())

    def forward(self, tokens: Tensor) -> Tensor:
        return self.end(self.backbone(F.embedding(tokens, self.words))) @ self.words.T


@unseen(mamba, "layers.1.mixer", "scan", regimes=ALL)
def decay_of_the_next_state(module, root):
    change(module, step=lambda self, step, state, decay, new: step(state, decay.roll(1, -1), new))


@unseen(mamba, "layers.0.mixer", "activations")
def steps_by_exp(module, root):
    change(module, steps=lambda self, steps, dt: torch.exp(dt))


@unseen(mamba, "layers.2.mixer", "residuals", regimes=FP32)
def skip_forgotten(module, root):
    change(module, skip=lambda self, skip, u: torch.zeros_like(u))


@unseen(mamba, "layers.1.mixer.conv1d", "conv layers")
def taps_reversed(module, root):
    module.weight.data = module.weight.data.flip(-1)


@unseen(mamba, "layers.2.mixer", "tails")
def convolution_looks_ahead(module, root):
    change(module, causal=lambda self, causal, h: self.conv1d(h.mT)[..., 1 : h.shape[1] + 1].mT)


@unseen(mamba, "layers.1.mixer.dt_proj", "wrong bias", regimes=ALL)
def step_bias_twice(module, root):
    on_output(module, lambda out: out + module.bias)


@unseen(mamba, "layers.0.mixer", "storage precision", regimes=FP32)
def state_kept_in_bf16(module, root):
    change(
        module,
        step=lambda self, step, state, decay, new: step(state, decay, new).bfloat16().float(),
    )


@unseen(mamba, "backbone.1", "masks", port=PairMamba)
def pair_scan_without_itself(module, root):
    change(module, past=lambda self, past, length: past(length).tril(-1))


@unseen(mamba, "backbone.2.to_b", "weights", port=PairMamba)
def pair_input_rows(module, root):
    module.weight.data[[1, 4]] = module.weight.data[[4, 1]]


@unseen(mamba, "backbone.0", "conv layers", port=PairMamba)
def pair_last_tap_lost(module, root):
    module.taps.data[0] = 0


@unseen(mamba, "end", "eps", port=PairMamba, regimes=FP32)
def pair_eps(module, root):
    module.eps = 0.03


right("mamba", mamba, "reordered", "bf16")
right("mamba in pairs", mamba, *ALL, port=PairMamba)


# --- A decaying average of each channel -----------------------------------------------------------


class TimeMix(nn.Module):
    """Token shift, and a decaying average weighted by exponentials of the keys."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mix_k, self.mix_v, self.mix_r, self.decay, self.bonus = (
            nn.Parameter(torch.empty(dim)) for _ in range(5)
        )
        self.key, self.value, self.receptance, self.output = (
            nn.Linear(dim, dim, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        before = self.shifted(x)
        k = self.key(self.mixed(x, before, self.mix_k))
        v = self.value(self.mixed(x, before, self.mix_v))
        r = self.receptance(self.mixed(x, before, self.mix_r))
        return self.output(torch.sigmoid(r) * self.average(k.float(), v.float()).to(x.dtype))

    def shifted(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 1, -1))

    def mixed(self, x: Tensor, before: Tensor, mix: Tensor) -> Tensor:
        share = 0.5 + mix
        return x * share + before * (1 - share)

    def average(self, k: Tensor, v: Tensor) -> Tensor:
        keep = torch.exp(-torch.exp(self.decay.float()))
        top = bottom = torch.zeros_like(k[:, 0])
        out = []
        for t in range(k.shape[1]):
            now = torch.exp(self.boosted(k[:, t]))
            out.append((top + now * v[:, t]) / (bottom + now))
            add = torch.exp(k[:, t])
            top, bottom = keep * top + add * v[:, t], keep * bottom + add
        return torch.stack(out, 1)

    def boosted(self, k: Tensor) -> Tensor:
        return self.bonus.float() + k


class ChannelMix(nn.Module):
    """A feed-forward of squares, gated."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mix_k, self.mix_r = (nn.Parameter(torch.empty(dim)) for _ in range(2))
        self.key = nn.Linear(dim, 3 * dim, bias=False)
        self.value = nn.Linear(3 * dim, dim, bias=False)
        self.receptance = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        before = F.pad(x, (0, 0, 1, -1))
        k = self.key(x * (0.5 + self.mix_k) + before * (0.5 - self.mix_k))
        r = self.receptance(x * (0.5 + self.mix_r) + before * (0.5 - self.mix_r))
        return torch.sigmoid(r) * self.value(self.act(k))

    def act(self, k: Tensor) -> Tensor:
        return torch.relu(k).square()


class RWKVBlock(nn.Module):
    """Both, with norms before."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.att, self.ffn = TimeMix(dim), ChannelMix(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.att(self.ln1(x))
        return x + self.ffn(self.ln2(x))


class RWKV(nn.Module):
    """The blocks, an embedding with a norm, a head."""

    def __init__(self, dim: int = 48) -> None:
        super().__init__()
        self.emb = nn.Embedding(101, dim)
        self.ln0 = nn.LayerNorm(dim)
        self.blocks = nn.ModuleList(RWKVBlock(dim) for _ in range(3))
        self.ln_out = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 101, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.ln0(self.emb(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_out(x))


def rwkv(*, outliers: bool = False) -> nn.Module:
    return models.weigh(RWKV(), 62, outliers)


def _folded(weight: Tensor, mix: Tensor) -> Tensor:
    return torch.cat([weight * (0.5 + mix), weight * (0.5 - mix)], 1).detach()


class PairMix(nn.Module):
    """The average as a softmax over places; the shift's shares are in the weights."""

    def __init__(self, norm: nn.LayerNorm, mix: TimeMix) -> None:
        super().__init__()
        self.norm = norm_like(norm)
        self.kvr = linear(
            _folded(mix.key.weight, mix.mix_k),
            _folded(mix.value.weight, mix.mix_v),
            _folded(mix.receptance.weight, mix.mix_r),
        )
        self.rate = nn.Parameter(-mix.decay.detach().exp())
        self.first = nn.Parameter(mix.bonus.detach().clone())
        self.out = linear(mix.output.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        before = torch.cat([torch.zeros_like(h[:, :1]), h[:, :-1]], 1)
        k, v, r = self.kvr(torch.cat([h, before], -1)).chunk(3, -1)
        shares = torch.softmax(self.scores(k.float()), 2)
        mixed = torch.einsum("btsd,bsd->btd", shares, v.float())
        return x + self.out(mixed.to(x.dtype) * r.sigmoid())

    def scores(self, k: Tensor) -> Tensor:
        places = torch.arange(k.shape[1])
        apart = (places[:, None] - places - 1)[..., None]
        late = torch.where(apart < 0, self.first.float(), apart * self.rate.float())
        return (k[:, None] + late).masked_fill(apart < -1, float("-inf"))


class PairFeed(nn.Module):
    """The squares, both projections in one."""

    def __init__(self, norm: nn.LayerNorm, feed: ChannelMix) -> None:
        super().__init__()
        self.norm = norm_like(norm)
        self.kr = linear(
            _folded(feed.key.weight, feed.mix_k), _folded(feed.receptance.weight, feed.mix_r)
        )
        self.v = linear(feed.value.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        both = self.kr(torch.cat([h, F.pad(h, (0, 0, 1, -1))], -1))
        k, r = both.split([3 * x.shape[-1], x.shape[-1]], -1)
        return x + r.sigmoid() * self.v(F.relu(k) ** 2)


class PairRWKV(nn.Module):
    """A flat sequence of both."""

    def __init__(self, model: RWKV) -> None:
        super().__init__()
        self.start = nn.Sequential(
            nn.Embedding.from_pretrained(model.emb.weight.detach().clone(), freeze=False),
            norm_like(model.ln0),
        )
        self.body = nn.Sequential()
        for block in model.blocks:
            self.body.append(PairMix(block.ln1, block.att))
            self.body.append(PairFeed(block.ln2, block.ffn))
        self.finish = nn.Sequential(norm_like(model.ln_out), linear(model.head.weight))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.finish(self.body(self.start(tokens)))


@unseen(rwkv, "blocks.1.att", "stale rows", regimes=ALL)
def shift_by_two(module, root):
    change(module, shifted=lambda self, shifted, x: F.pad(x, (0, 0, 2, -2)))


@unseen(rwkv, "blocks.0.att", "wrong bias")
def bonus_forgotten(module, root):
    change(module, boosted=lambda self, boosted, k: k)


@unseen(rwkv, "blocks.2.ffn", "activations")
def not_squared(module, root):
    change(module, act=lambda self, act, k: torch.relu(k))


@unseen(rwkv, "blocks.1.att", "scan", regimes=FP32)
def average_in_bf16(module, root):
    change(module, average=lambda self, average, k, v: average(k, v.bfloat16().float()))


@unseen(rwkv, "ln0", "norm layers")
def first_norm_without_shift(module, root):
    module.bias.data.zero_()


@unseen(rwkv, "body.2", "scan", port=PairRWKV)
def pair_decay_one_late(module, root):
    def scores(self, scores, k):
        places = torch.arange(k.shape[1])
        apart = (places[:, None] - places)[..., None]
        late = torch.where(apart < 1, self.first.float(), apart * self.rate.float())
        return (k[:, None] + late).masked_fill(apart < 0, float("-inf"))

    change(module, scores=scores)


@unseen(rwkv, "body.3.kr", "weights", port=PairRWKV)
def pair_one_column(module, root):
    module.weight.data[:, 5] *= -1


@unseen(rwkv, "body.4.kvr", "weights", port=PairRWKV)
def pair_values_of_the_keys_mix(module, root):
    module.weight.data[48:96] = module.weight.data[48:96].roll(1, 0)


right("rwkv", rwkv, "reordered", "bf16")
right("rwkv in pairs", rwkv, *ALL, port=PairRWKV)
