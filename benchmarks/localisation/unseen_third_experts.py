"""Mixtral, its routing written as products over all experts; and a language model of LSTMs.

The port of the latter multiplies all inputs at once and steps through the rest by itself.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import models
from localisation.copies import linear
from localisation.planting import change
from localisation.unseen_third import BOTH, harmless, third

# --- Two of the experts for each token ------------------------------------------------------------


class MixtralExpert(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class MixtralMoe(nn.Module):
    """Chances of all, of which the two largest are taken and made to sum to one."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, 4, bias=False)
        self.experts = nn.ModuleList(MixtralExpert(dim, 72) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, x.shape[-1])
        share, chosen = self.chances(self.gate(flat)).topk(2, -1)
        share = self.shared(share).to(x.dtype)
        out = torch.zeros_like(flat)
        for n, expert in enumerate(self.experts):
            row, place = torch.where(chosen == n)
            out.index_add_(0, row, expert(flat[row]) * share[row, place, None])
        return out.view_as(x)

    def chances(self, scores: Tensor) -> Tensor:
        return F.softmax(scores, -1, dtype=torch.float32)

    def shared(self, share: Tensor) -> Tensor:
        return share / share.sum(-1, keepdim=True)


class MixtralLayer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = models.RMSNorm(dim), models.RMSNorm(dim)
        self.q, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(dim, dim // 2, bias=False) for _ in range(2))
        self.moe = MixtralMoe(dim)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (-1, 12)).transpose(1, 2) for f in (self.q, self.k, self.v))
        k, v = (each.repeat_interleave(2, 1) for each in (k, v))
        scores = (q @ k.mT) * 12**-0.5
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        seen = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
        x = x + self.o(seen.transpose(1, 2).flatten(2))
        return x + self.moe(self.norm2(x))


class Mixtral(nn.Module):
    def __init__(self, dim: int = 48) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(101, dim), nn.Parameter(torch.empty(16, dim))
        self.layers = nn.ModuleList(MixtralLayer(dim) for _ in range(2))
        self.norm, self.head = models.RMSNorm(dim), nn.Linear(dim, 101, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def mixtral(*, outliers: bool = False) -> nn.Module:
    return models.weigh(Mixtral(), 361, outliers)


class EinsumMoe(nn.Module):
    """All experts on all tokens, most of them weighed with zero."""

    def __init__(self, of: MixtralMoe) -> None:
        super().__init__()
        self.router = linear(of.gate.weight)
        self.w13 = nn.Parameter(
            torch.stack([torch.cat((e.w1.weight, e.w3.weight)).detach() for e in of.experts])
        )
        self.w2 = nn.Parameter(torch.stack([e.w2.weight.detach() for e in of.experts]))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.routed(self.router(x).float()).to(x.dtype)
        h = self.gated(torch.einsum("btd,ehd->bteh", x, self.w13))
        return torch.einsum("bte,bteh,edh->btd", weights, h, self.w2)

    def routed(self, scores: Tensor) -> Tensor:
        best, chosen = scores.topk(2, -1)
        return torch.zeros_like(scores).scatter(-1, chosen, self.share(best))

    def share(self, best: Tensor) -> Tensor:
        return best.softmax(-1)

    def gated(self, h: Tensor) -> Tensor:
        a, b = h.tensor_split(2, -1)
        return a * torch.sigmoid(a) * b


class EinsumLayer(nn.Module):
    def __init__(self, of: MixtralLayer) -> None:
        super().__init__()
        self.g1, self.g2 = (nn.Parameter(e.weight.detach().clone()) for e in (of.norm1, of.norm2))
        self.qkv, self.out = linear(of.q.weight, of.k.weight, of.v.weight), linear(of.o.weight)
        self.mixture = EinsumMoe(of.moe)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.normed(x, self.g1)).unflatten(-1, (8, 12)).split((4, 2, 2), 2)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mixture(self.normed(x, self.g2))

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, 1e-5)


class EinsumMixtral(nn.Module):
    def __init__(self, model: Mixtral) -> None:
        super().__init__()
        self.tok = nn.Embedding.from_pretrained(model.embed.weight.detach().clone())
        self.pos = nn.Parameter(model.places.detach().clone())
        self.blocks = nn.Sequential(*(EinsumLayer(each) for each in model.layers))
        self.g, self.head = nn.Parameter(model.norm.weight.detach()), linear(model.head.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks(self.tok(tokens) + self.pos)
        return self.head(F.rms_norm(x, x.shape[-1:], self.g, 1e-5))


@third(mixtral, "blocks.0.mixture", "routing", port=EinsumMixtral, regimes=BOTH)
def mixtral_not_made_to_sum_to_one(module, root):
    def routed(self, routed, scores):
        best, chosen = scores.softmax(-1).topk(2, -1)
        return torch.zeros_like(scores).scatter(-1, chosen, best)

    change(module, routed=routed)


@third(mixtral, "blocks.1.mixture", "routing", port=EinsumMixtral)
def mixtral_equal_shares(module, root):
    change(module, share=lambda self, share, best: torch.full_like(best, 0.5))


@third(mixtral, "blocks.1.mixture", "activations", port=EinsumMixtral, regimes=BOTH)
def mixtral_first_and_third_swapped(module, root):
    change(module, gated=lambda self, gated, h: gated(torch.cat(h.chunk(2, -1)[::-1], -1)))


@third(mixtral, "blocks.0.mixture", "weights", port=EinsumMixtral)
def mixtral_experts_in_another_order(module, root):
    module.w2.data = module.w2.data[[0, 2, 1, 3]]


@third(mixtral, "layers.1.moe", "routing", against=EinsumMixtral)
def mixtral_chances_by_sigmoid(module, root):
    change(module, chances=lambda self, chances, scores: scores.float().sigmoid())


@third(mixtral, "layers.0.moe.experts.2.w3", "weights", against=EinsumMixtral)
def mixtral_rows_of_one_expert(module, root):
    module.weight.data = module.weight.data.flip(0)


harmless("mixtral einsum", mixtral, "same", port=EinsumMixtral)
harmless("mixtral against einsum", mixtral, "same", against=EinsumMixtral)


# --- Recurrent ------------------------------------------------------------------------------------


class LstmLm(nn.Module):
    """Two layers in torch's own module; the embedding is the head, too."""

    def __init__(self, dim: int = 40) -> None:
        super().__init__()
        self.encoder, self.decoder_bias = nn.Embedding(101, dim), nn.Parameter(torch.empty(101))
        self.rnn = nn.LSTM(dim, dim, 2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        out, _ = self.rnn(self.encoder(tokens))
        return F.linear(out, self.encoder.weight, self.decoder_bias)


def lstm_lm(*, outliers: bool = False) -> nn.Module:
    return models.weigh(LstmLm(), 362, outliers)


class Steps(nn.Module):
    """One layer; inputs are multiplied at once, states one after the other."""

    def __init__(self, of: nn.LSTM, n: int) -> None:
        super().__init__()
        w, u = getattr(of, f"weight_ih_l{n}"), getattr(of, f"weight_hh_l{n}")
        bias = getattr(of, f"bias_ih_l{n}") + getattr(of, f"bias_hh_l{n}")
        self.of_input = getattr(of, f"bias_ih_l{n}").tolist()
        self.inward, self.across = linear(w, bias=bias.detach()), nn.Parameter(u.detach().T.clone())

    def forward(self, x: Tensor) -> Tensor:
        given = self.inward(x)
        h = c = torch.zeros_like(x[:, 0])
        made = []
        for t in range(x.shape[1]):
            i, f, g, o = self.gates(given[:, t] + h @ self.across)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = self.shown(torch.sigmoid(o), c)
            made.append(h)
        return torch.stack(made, 1)

    def gates(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.chunk(4, -1)

    def shown(self, gate: Tensor, c: Tensor) -> Tensor:
        return gate * torch.tanh(c)


class StepLm(nn.Module):
    def __init__(self, model: LstmLm) -> None:
        super().__init__()
        self.wte = nn.Embedding.from_pretrained(model.encoder.weight.detach().clone())
        self.stack = nn.ModuleList(Steps(model.rnn, n) for n in range(2))
        self.head = linear(model.encoder.weight, bias=model.decoder_bias.detach())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        for layer in self.stack:
            x = layer(x)
        return self.head(x)


@third(lstm_lm, "stack.1", "state", port=StepLm, regimes=BOTH)
def lstm_gates_of_keras(module, root):
    def gates(self, gates, x):
        i, f, g, o = gates(x)
        return i, f, o, g

    change(module, gates=gates)


@third(lstm_lm, "stack.0.inward", "weights", port=StepLm)
def lstm_one_of_two_biases(module, root):
    module.bias.data.copy_(torch.tensor(root.stack[0].of_input))


@third(lstm_lm, "stack.0", "weights", port=StepLm)
def lstm_recurrent_blocks_transposed(module, root):
    blocks = module.across.data.unflatten(1, (4, -1))
    module.across.data = blocks.permute(2, 1, 0).flatten(1).contiguous()


@third(lstm_lm, "stack.1", "state", port=StepLm)
def lstm_cell_shown_as_it_is(module, root):
    change(module, shown=lambda self, shown, gate, c: gate * c)


@third(lstm_lm, "rnn", "weights", against=StepLm)
def lstm_bias_of_the_forget_gate(module, root):
    module.bias_hh_l1.data[40:80] += 1.0


harmless("lstm by steps", lstm_lm, "same", port=StepLm)
harmless("lstm against steps", lstm_lm, "same", against=StepLm)
