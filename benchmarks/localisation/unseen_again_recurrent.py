"""Recurrent models: a gated linear recurrence, and a speech model of hand-written cells.

One port scans in pairs and makes its gates dense; the other uses the recurrent layers of torch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import models
from localisation.copies import linear
from localisation.planting import change
from localisation.unseen_again import BOTH, again, harmless

# --- A gated linear recurrence --------------------------------------------------------------------


class BlockLinear(nn.Module):
    """One small product for each head."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(heads, width, width))
        self.b = nn.Parameter(torch.empty(heads, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, self.b.shape)
        return (torch.einsum("bthi,hij->bthj", x, self.w) + self.b).flatten(-2)


class RGLRU(nn.Module):
    """A recurrence whose decay depends on its input."""

    def __init__(self, dim: int, heads: int = 4) -> None:
        super().__init__()
        self.input_gate, self.a_gate = (BlockLinear(heads, dim // heads) for _ in range(2))
        self.a_param = nn.Parameter(torch.empty(dim))
        self.power = 8.0

    def forward(self, x: Tensor) -> Tensor:
        gate_x, gate_a = torch.sigmoid(self.input_gate(x)), torch.sigmoid(self.a_gate(x))
        log_a = -self.power * gate_a.float() * F.softplus(self.a_param.float())
        fresh = (x * gate_x).float() * self.keep(log_a)
        state, out = torch.zeros_like(fresh[:, 0]), []
        for t in range(x.shape[1]):
            state = torch.exp(log_a[:, t]) * state + fresh[:, t]
            out.append(state)
        return torch.stack(out, 1).to(x.dtype)

    def keep(self, log_a: Tensor) -> Tensor:
        return torch.sqrt(1 - torch.exp(2 * log_a))


class RecurrentBlock(nn.Module):
    """A convolution and the recurrence, gated by a branch."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.linear_x, self.linear_y = nn.Linear(dim, inner), nn.Linear(dim, inner)
        self.conv_1d = nn.Conv1d(inner, inner, 4, groups=inner, padding=3)
        self.rg_lru = RGLRU(inner)
        self.linear_out = nn.Linear(inner, dim)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.linear_y(x), approximate="tanh")
        h = self.conv_1d(self.linear_x(x).mT)[..., : x.shape[1]].mT
        return self.linear_out(self.rg_lru(h) * y)


class GriffinLayer(nn.Module):
    """The recurrence, then a gated feed-forward."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.norm2 = models.RMSNorm(dim), models.RMSNorm(dim)
        self.mix = RecurrentBlock(dim, dim + 16)
        self.up, self.gate, self.down = (
            nn.Linear(dim, 2 * dim),
            nn.Linear(dim, 2 * dim),
            nn.Linear(2 * dim, dim),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm(x))
        h = self.norm2(x)
        return x + self.down(F.gelu(self.gate(h), approximate="tanh") * self.up(h))


class Griffin(nn.Module):
    """The decoder; its head is its embedding."""

    def __init__(self, dim: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(101, dim)
        self.layers = nn.ModuleList(GriffinLayer(dim) for _ in range(3))
        self.norm = models.RMSNorm(dim)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.embed.weight)


def griffin(*, outliers: bool = False) -> nn.Module:
    return models.weigh(Griffin(), 201, outliers)


class Recurrence(nn.Module):
    """Both gates in one dense product, the scan over all pairs of places."""

    def __init__(self, of: RecurrentBlock) -> None:
        super().__init__()
        gates = [of.rg_lru.input_gate, of.rg_lru.a_gate]
        dense = [torch.block_diag(*each.w.detach().mT) for each in gates]
        self.gates = linear(*dense, bias=torch.cat([each.b.detach().flatten() for each in gates]))
        self.rate = nn.Parameter(F.softplus(of.rg_lru.a_param.detach()))
        self.both = linear(
            of.linear_x.weight,
            of.linear_y.weight,
            bias=torch.cat([of.linear_x.bias.detach(), of.linear_y.bias.detach()]),
        )
        self.taps = nn.Parameter(of.conv_1d.weight.detach()[:, 0].T.clone())
        self.offset = nn.Parameter(of.conv_1d.bias.detach().clone())
        self.back = linear(of.linear_out.weight, bias=of.linear_out.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        h, y = self.both(x).chunk(2, -1)
        return self.back(F.gelu(y, approximate="tanh") * self.scanned(self.shifted(h)))

    def shifted(self, h: Tensor) -> Tensor:
        padded = F.pad(h, (0, 0, 3, 0))
        length = h.shape[1]
        return sum(padded[:, n : n + length] * self.taps[n] for n in range(4)) + self.offset

    def scanned(self, h: Tensor) -> Tensor:
        into, forget = torch.sigmoid(self.gates(h)).chunk(2, -1)
        log_a = self.logs(forget.float())
        fresh = torch.sqrt(-torch.expm1(2 * log_a)) * (h * into).float()
        total = log_a.cumsum(1)
        decay = torch.exp(self.between(total))
        return torch.einsum("btsc,bsc->btc", decay, fresh).to(h.dtype)

    def logs(self, forget: Tensor) -> Tensor:
        return -8.0 * self.rate.float() * forget

    def between(self, total: Tensor) -> Tensor:
        later = torch.ones(total.shape[1], total.shape[1], dtype=torch.bool).tril()
        apart = total[:, :, None] - total[:, None]
        return apart.masked_fill(~later[..., None], float("-inf"))


class PairGriffin(nn.Module):
    """The same, its layers flat."""

    def __init__(self, model: Griffin) -> None:
        super().__init__()
        self.table = nn.Embedding.from_pretrained(model.embed.weight.detach().clone())
        self.recurrences = nn.ModuleList(Recurrence(each.mix) for each in model.layers)
        self.widen = nn.ModuleList(
            linear(
                each.gate.weight,
                each.up.weight,
                bias=torch.cat([each.gate.bias.detach(), each.up.bias.detach()]),
            )
            for each in model.layers
        )
        self.narrow = nn.ModuleList(
            linear(each.down.weight, bias=each.down.bias.detach()) for each in model.layers
        )
        norms = [n.weight.detach() for each in model.layers for n in (each.norm, each.norm2)]
        self.scales = nn.Parameter(torch.stack([*norms, model.norm.weight.detach()]))
        self.eps = model.norm.eps

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for n, mix in enumerate(self.recurrences):
            x = mix(self.normed(x, 2 * n)) + x
            gate, up = self.widen[n](self.normed(x, 2 * n + 1)).chunk(2, -1)
            x = self.narrow[n](up * F.gelu(gate, approximate="tanh")) + x
        return self.normed(x, -1) @ self.table.weight.T

    def normed(self, x: Tensor, which: int) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.scales[which], self.eps)


@again(griffin, "recurrences.1", "recurrences", port=PairGriffin, regimes=BOTH)
def griffin_power_of_seven(module, root):
    change(module, logs=lambda self, logs, forget: logs(forget) * 7 / 8)


@again(griffin, "recurrences.0", "conv layers", port=PairGriffin, regimes=BOTH)
def griffin_taps_reversed(module, root):
    module.taps.data = module.taps.data.flip(0)


@again(griffin, "recurrences.2", "recurrences", port=PairGriffin)
def griffin_state_of_the_place_before(module, root):
    def between(self, between, total):
        return between(total).diagonal_scatter(
            torch.full((2, total.shape[2], 15), float("-inf")), -1, 1, 2
        )

    change(module, between=between)


@again(griffin, "recurrences.1.gates", "weights", port=PairGriffin)
def griffin_block_transposed(module, root):
    module.weight.data[:16, :16] = module.weight.data[:16, :16].T.clone()


@again(griffin, "widen.2", "biases", port=PairGriffin, regimes=BOTH)
def griffin_bias_of_the_gate_lost(module, root):
    module.bias.data[:96] = 0


@again(griffin, "layers.1.mix.rg_lru", "recurrences", against=PairGriffin, regimes=BOTH)
def griffin_kept_without_root(module, root):
    change(module, keep=lambda self, keep, log_a: 1 - torch.exp(2 * log_a))


@again(griffin, "layers.2.mix.rg_lru.a_gate", "biases", against=PairGriffin)
def griffin_gate_without_bias(module, root):
    module.b.data.zero_()


harmless("griffin in pairs", griffin, port=PairGriffin)
harmless("griffin against pairs", griffin, "same", "reordered", against=PairGriffin)


# --- Speech of cells ------------------------------------------------------------------------------


class Cell(nn.Module):
    """One step of a long short-term memory."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.ih, self.hh = nn.Linear(dim, 4 * hidden), nn.Linear(hidden, 4 * hidden)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        i, f, g, o = (self.ih(x) + self.hh(h)).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


class BothWays(nn.Module):
    """Two cells, one from the end."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.forth, self.back = Cell(dim, hidden), Cell(dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        places = range(x.shape[1])
        forth, back = self.along(self.forth, x, places), self.along(self.back, x, places[::-1])
        return torch.cat([forth, back], -1)

    def along(self, cell: nn.Module, x: Tensor, places: range) -> Tensor:
        h = c = x.new_zeros(x.shape[0], self.hidden)
        out = {}
        for t in places:
            h, c = cell(x[:, t], h, c)
            out[t] = h
        return torch.stack([out[t] for t in range(x.shape[1])], 1)


class Gru(nn.Module):
    """A gated recurrent unit over a sequence."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.x, self.h = nn.Linear(dim, 3 * hidden), nn.Linear(hidden, 3 * hidden)

    def forward(self, x: Tensor) -> Tensor:
        h, out = x.new_zeros(x.shape[0], self.h.in_features), []
        for part in self.x(x).unbind(1):
            xr, xz, xn = part.chunk(3, -1)
            hr, hz, hn = self.h(h).chunk(3, -1)
            z = torch.sigmoid(xz + hz)
            h = (1 - z) * torch.tanh(xn + torch.sigmoid(xr + hr) * hn) + z * h
            out.append(h)
        return torch.stack(out, 1)


class Speech(nn.Module):
    """Letters, convolutions with batch norms, a recurrence both ways, frames."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.letters = nn.Embedding(101, dim)
        self.convs = nn.ModuleList(nn.Conv1d(dim, dim, 5, padding=2) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm1d(dim) for _ in range(2))
        self.lstm = BothWays(dim, 20)
        self.prenet = nn.Sequential(nn.Linear(40, 48), nn.ReLU(), nn.Linear(48, 24), nn.ReLU())
        self.gru = Gru(24, 28)
        self.frames = nn.Linear(28, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.letters(tokens).mT
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x)))
        return self.frames(self.gru(self.prenet(self.lstm(x.mT))))


def speech(*, outliers: bool = False) -> nn.Module:
    return models.weigh(Speech(), 202, outliers)


class LayeredSpeech(nn.Module):
    """The same with layers of torch; the batch norms are in the convolutions."""

    def __init__(self, model: Speech) -> None:
        super().__init__()
        self.emb = nn.Embedding.from_pretrained(model.letters.weight.detach().clone())
        self.front = nn.Sequential(*self.folded(model))
        self.encoder = nn.LSTM(32, 20, batch_first=True, bidirectional=True)
        self.decoder = nn.GRU(24, 28, batch_first=True)
        pre, cells = model.prenet, {"": model.lstm.forth, "_reverse": model.lstm.back}
        kept = {}
        for end, cell in cells.items():
            for name, of in (("ih", cell.ih), ("hh", cell.hh)):
                kept[f"weight_{name}_l0{end}"] = of.weight.detach()
                kept[f"bias_{name}_l0{end}"] = of.bias.detach()
        self.encoder.load_state_dict(kept)
        names = (("ih", model.gru.x), ("hh", model.gru.h))
        self.decoder.load_state_dict(
            {f"weight_{n}_l0": of.weight.detach() for n, of in names}
            | {f"bias_{n}_l0": of.bias.detach() for n, of in names}
        )
        self.first = linear(pre[0].weight, bias=pre[0].bias.detach())
        self.second = linear(pre[2].weight, bias=pre[2].bias.detach())
        self.out = linear(model.frames.weight, bias=model.frames.bias.detach())

    def folded(self, model: Speech) -> list[nn.Module]:
        out: list[nn.Module] = []
        for conv, norm in zip(model.convs, model.norms, strict=True):
            scale = norm.weight.detach() / torch.sqrt(norm.running_var + norm.eps)
            new = nn.Conv1d(32, 32, 5, padding=2)
            new.weight.data = conv.weight.detach() * scale[:, None, None]
            new.bias.data = (conv.bias.detach() - norm.running_mean) * scale + norm.bias.detach()
            out += [new, nn.ReLU()]
        return out

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.front(self.emb(tokens).transpose(1, 2)).transpose(1, 2)
        x, _ = self.encoder(x)
        x = torch.relu(self.second(torch.relu(self.first(x))))
        return self.out(self.decoder(x)[0])


@again(speech, "encoder", "recurrences", port=LayeredSpeech, regimes=BOTH)
def speech_gates_in_another_order(module, root):
    rows = torch.cat([torch.arange(20, 40), torch.arange(20), torch.arange(40, 80)])
    module.weight_ih_l0.data = module.weight_ih_l0.data[rows]


@again(speech, "decoder", "biases", port=LayeredSpeech)
def speech_bias_of_the_state_lost(module, root):
    module.bias_hh_l0.data[56:] = 0


@again(speech, "front.2", "norm layers", port=LayeredSpeech, regimes=BOTH)
def speech_mean_not_folded(module, root):
    module.bias.data += 0.1


@again(speech, "second", "weights", port=LayeredSpeech)
def speech_rows_of_the_prenet(module, root):
    module.weight.data[:8] = module.weight.data[8:16]


@again(speech, "gru", "recurrences", against=LayeredSpeech, regimes=BOTH)
def speech_update_gate_turned(module, root):
    def forward(self, forward, x):
        h, out = x.new_zeros(x.shape[0], 28), []
        for part in self.x(x).unbind(1):
            xr, xz, xn = part.chunk(3, -1)
            hr, hz, hn = self.h(h).chunk(3, -1)
            z = torch.sigmoid(xz + hz)
            h = z * torch.tanh(xn + torch.sigmoid(xr + hr) * hn) + (1 - z) * h
            out.append(h)
        return torch.stack(out, 1)

    change(module, forward=forward)


@again(speech, "lstm", "order", against=LayeredSpeech, regimes=BOTH)
def speech_back_not_turned(module, root):
    def along(self, along, cell, x, places):
        out = along(cell, x, places)
        return out.flip(1) if cell is self.back else out

    change(module, along=along)


harmless("speech in layers", speech, port=LayeredSpeech)
harmless("speech against layers", speech, against=LayeredSpeech)
