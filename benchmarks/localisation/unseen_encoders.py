"""An encoder with a pooler, and a ranker; the ports have weights transposed or in other order."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import drives, models
from localisation.copies import linear
from localisation.drives import Run
from localisation.planting import change, on_output
from localisation.unseen_ports import ALL, right, unseen

# --- An encoder with a pooler ---------------------------------------------------------------------


class BertSelf(nn.Module):
    """Attention with biases and a mask of padding."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (self.split(f(x)) for f in (self.query, self.key, self.value))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + mask
        return (self.shares(scores) @ v).permute(0, 2, 1, 3).reshape(x.shape)

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).permute(0, 2, 1, 3)

    def shares(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)


class BertOutput(nn.Module):
    """Projection, residual, norm."""

    def __init__(self, wide: int, dim: int) -> None:
        super().__init__()
        self.dense = nn.Linear(wide, dim)
        self.LayerNorm = nn.LayerNorm(dim, eps=1e-12)
        self.dropout = nn.Dropout(0.1)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return self.LayerNorm(self.dropout(self.dense(h)) + x)


class BertLayer(nn.Module):
    """One layer."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention = BertSelf(dim, 4)
        self.attended = BertOutput(dim, dim)
        self.intermediate = nn.Linear(dim, 3 * dim)
        self.output = BertOutput(3 * dim, dim)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.attended(self.attention(x, mask), x)
        return self.output(self.act(self.intermediate(x)), x)

    def act(self, x: Tensor) -> Tensor:
        return F.gelu(x)


class BertEmbeddings(nn.Module):
    """Words, places and kinds, summed and normed."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.word, self.place, self.kind = (nn.Embedding(n, dim) for n in (101, 32, 2))
        self.LayerNorm = nn.LayerNorm(dim, eps=1e-12)

    def forward(self, tokens: Tensor, kinds: Tensor) -> Tensor:
        places = self.places(tokens.shape[1])
        return self.LayerNorm(self.word(tokens) + self.place(places) + self.kind(kinds))

    def places(self, length: int) -> Tensor:
        return torch.arange(length)


class Pooler(nn.Module):
    """The first place, projected."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dense = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.dense(self.taken(x)))

    def taken(self, x: Tensor) -> Tensor:
        return x[:, 0]


class Bert(nn.Module):
    """An encoder and two classes."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.embeddings = BertEmbeddings(dim)
        self.layer = nn.ModuleList(BertLayer(dim) for _ in range(3))
        self.pooler = Pooler(dim)
        self.classifier = nn.Linear(dim, 5)

    def forward(self, tokens: Tensor, kinds: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embeddings(tokens, kinds)
        mask = ((~keep)[:, None, None] * -10000.0).to(x.dtype)
        for each in self.layer:
            x = each(x, mask)
        return x, self.classifier(self.pooler(x))


def bert(*, outliers: bool = False) -> nn.Module:
    return models.weigh(Bert(), 64, outliers)


def pair_of_sentences(dtype: torch.dtype) -> Run:
    keep = torch.ones(2, 16, dtype=torch.bool)
    keep[0, 12:] = False
    kinds = (torch.arange(16) > 6).long().expand(2, -1)
    return Run((drives.tokens(28), kinds, keep))


class PlainBert(nn.Module):
    """The same as one module: weights stacked over layers, [in, out], bool masks, einsum."""

    def __init__(self, model: Bert) -> None:
        super().__init__()
        told = {"word": model.embeddings.word, "place": model.embeddings.place}
        for name, each in {**told, "kind": model.embeddings.kind}.items():
            setattr(self, name, nn.Parameter(each.weight.detach().clone()))
        self.start_w = nn.Parameter(model.embeddings.LayerNorm.weight.detach().clone())
        self.start_b = nn.Parameter(model.embeddings.LayerNorm.bias.detach().clone())
        self.encoder = nn.ModuleList(PlainBertLayer(each) for each in model.layer)
        self.pool = nn.Sequential(
            linear(model.pooler.dense.weight, bias=model.pooler.dense.bias),
            nn.Tanh(),
            linear(model.classifier.weight, bias=model.classifier.bias),
        )

    def forward(self, tokens: Tensor, kinds: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        x = self.summed(tokens, kinds)
        x = F.layer_norm(x, x.shape[-1:], self.start_w, self.start_b, 1e-12)
        for each in self.encoder:
            x = each(x, keep)
        return x, self.pool(x[:, 0])

    def summed(self, tokens: Tensor, kinds: Tensor) -> Tensor:
        return self.kind[kinds] + self.place[: tokens.shape[1]] + self.word[tokens]


class PlainBertLayer(nn.Module):
    """A layer whose weights are plain tensors."""

    def __init__(self, of: BertLayer) -> None:
        super().__init__()
        self.heads = of.attention.heads
        parts = (of.attention.query, of.attention.key, of.attention.value)
        heads = [each.weight.detach().view(self.heads, -1, each.in_features) for each in parts]
        self.w_in = nn.Parameter(torch.stack(heads))
        biases = [each.bias.detach().view(self.heads, -1) for each in parts]
        self.b_in = nn.Parameter(torch.stack(biases))
        for name, each in (
            ("out", of.attended.dense),
            ("up", of.intermediate),
            ("down", of.output.dense),
        ):
            setattr(self, f"w_{name}", nn.Parameter(each.weight.detach().T.contiguous()))
            setattr(self, f"b_{name}", nn.Parameter(each.bias.detach().clone()))
        for name, norm in (("1", of.attended.LayerNorm), ("2", of.output.LayerNorm)):
            setattr(self, f"g_{name}", nn.Parameter(norm.weight.detach().clone()))
            setattr(self, f"s_{name}", nn.Parameter(norm.bias.detach().clone()))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        qkv = torch.einsum("btc,nhdc->nbhtd", x, self.w_in) + self.b_in[:, None, :, None]
        mixed = F.scaled_dot_product_attention(*qkv, attn_mask=self.seen(keep))
        h = torch.addmm(self.b_out, mixed.transpose(1, 2).reshape(-1, x.shape[-1]), self.w_out)
        x = F.layer_norm(h.view_as(x) + x, x.shape[-1:], self.g_1, self.s_1, 1e-12)
        h = self.act(x @ self.w_up + self.b_up) @ self.w_down + self.b_down
        return F.layer_norm(h + x, x.shape[-1:], self.g_2, self.s_2, 1e-12)

    def seen(self, keep: Tensor) -> Tensor:
        return keep[:, None, None, :]

    def act(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


@unseen(bert, "layer.1.attention.key", "wrong bias", run=pair_of_sentences)
def bias_of_the_queries(module, root):
    module.weight.data[9] *= 1.2
    module.bias.data.copy_(root.layer[1].attention.query.bias)


@unseen(bert, "pooler", "stale rows", run=pair_of_sentences)
def last_place_pooled(module, root):
    change(module, taken=lambda self, taken, x: x[:, -1])


@unseen(bert, "embeddings", "off by one", run=pair_of_sentences)
def places_from_one(module, root):
    change(module, places=lambda self, places, length: places(length) + 1)


@unseen(bert, "layer.2.attended.dropout", "dropout", run=pair_of_sentences)
def dropout_is_on(module, root):
    module.train()


@unseen(bert, "layer.0.output.LayerNorm", "eps", run=pair_of_sentences, regimes=ALL)
def eps_of_another_library(module, root):
    module.eps = 0.05


@unseen(bert, "layer.1.attention", "norm axis", run=pair_of_sentences)
def softmax_over_queries(module, root):
    change(module, shares=lambda self, shares, scores: scores.softmax(-2))


@unseen(bert, "layer.2.intermediate", "non-finite", run=pair_of_sentences)
def one_weight_is_nan(module, root):
    module.weight.data[7, 7] = float("nan")


@unseen(bert, "encoder.1", "masks", port=PlainBert, run=pair_of_sentences)
def plain_mask_ignored(module, root):
    change(module, seen=lambda self, seen, keep: None)


@unseen(bert, "encoder.0", "weights", port=PlainBert, run=pair_of_sentences)
def plain_square_not_transposed(module, root):
    module.w_out.data = module.w_out.data.T.contiguous()


@unseen(bert, "encoder.2", "head mapping", port=PlainBert, run=pair_of_sentences)
def plain_two_heads_of_values(module, root):
    module.w_in.data[2, [0, 3]] = module.w_in.data[2, [3, 0]]


@unseen(bert, "", "wrong bias", port=PlainBert, run=pair_of_sentences)
def plain_kinds_forgotten(module, root):
    change(
        module,
        summed=lambda self, summed, tokens, kinds: summed(tokens, torch.zeros_like(kinds)),
    )


@unseen(bert, "pool.1", "activations", port=PlainBert, run=pair_of_sentences)
def plain_pool_clipped(module, root):
    change(module, forward=lambda self, forward, x: F.hardtanh(x))


right("bert", bert, "reordered", "bf16", "outliers", run=pair_of_sentences)
right("bert plain", bert, *ALL, port=PlainBert, run=pair_of_sentences)


# --- A ranker: tables, products of all pairs, two perceptrons -------------------------------------


class Ranker(nn.Module):
    """Bags of embeddings, dense features, their products, a probability."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, dim, mode="sum") for n in (50, 30, 40))
        self.bottom = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, dim), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(dim + 6, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.bottom(dense)
        bags = [table(each) for table, each in zip(self.tables, ids.unbind(1), strict=True)]
        return torch.sigmoid(self.top(self.crossed(x, bags)))

    def crossed(self, x: Tensor, bags: list[Tensor]) -> Tensor:
        every = torch.stack([x, *bags], 1)
        products = every @ every.mT
        low = torch.tril_indices(4, 4, -1)
        return torch.cat([x, products[:, low[0], low[1]]], -1)


def ranker(*, outliers: bool = False) -> nn.Module:
    return models.weigh(Ranker(), 65, outliers)


def clicks(dtype: torch.dtype) -> Run:
    generator = torch.Generator().manual_seed(77)
    dense = torch.rand(24, 13, generator=generator).to(dtype)
    return Run((dense, torch.randint(30, (24, 3, 5), generator=generator)))


class OneTableRanker(nn.Module):
    """One table with offsets; the products in another order, and the weights to match."""

    def __init__(self, model: Ranker) -> None:
        super().__init__()
        weights = [each.weight.detach() for each in model.tables]
        self.table = nn.Parameter(torch.cat(weights))
        self.register_buffer("starts", torch.tensor([0, 50, 80]))
        first, second, up, last = model.bottom[0], model.bottom[2], model.top[0], model.top[2]
        self.enter = linear(first.weight, bias=first.bias)
        self.squeeze = linear(second.weight, bias=second.bias)
        low, high = torch.tril_indices(4, 4, -1), torch.triu_indices(4, 4, 1)
        places = {pair: n for n, pair in enumerate(zip(*low.tolist(), strict=True))}
        order = [places[b, a] for a, b in zip(*high.tolist(), strict=True)]
        dim = self.table.shape[1]
        columns = [dim + n for n in order] + list(range(dim))
        self.join = linear(up.weight[:, columns], bias=up.bias)
        self.decide = linear(last.weight, bias=last.bias)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = F.relu(self.squeeze(F.relu(self.enter(dense))))
        bags = self.pooled(self.table[ids + self.starts[:, None]])
        every = torch.cat([x[:, None], bags], 1)
        products = torch.einsum("bid,bjd->bij", every, every)
        high = torch.triu_indices(4, 4, 1)
        joined = torch.cat([products[:, high[0], high[1]], x], -1)
        return (
            F.relu(self.join(joined)).matmul(self.decide.weight.T).add(self.decide.bias).sigmoid()
        )

    def pooled(self, rows: Tensor) -> Tensor:
        return rows.sum(2)


@unseen(ranker, "tables.1", "scale", run=clicks)
def bags_averaged(module, root):
    module.mode = "mean"


@unseen(ranker, "", "off by one", run=clicks)
def products_with_themselves(module, root):
    def crossed(self, crossed, x, bags):
        every = torch.stack([x, *bags], 1)
        low = torch.tril_indices(4, 4, 0)[:, :6]
        return torch.cat([x, (every @ every.mT)[:, low[0], low[1]]], -1)

    change(module, crossed=crossed)


@unseen(ranker, "bottom.0", "tails", run=clicks, regimes=ALL)
def last_rows_of_the_batch(module, root):
    on_output(module, lambda out: torch.cat([out[:-3], torch.zeros_like(out[-3:])]))


@unseen(ranker, "join", "weights", port=OneTableRanker, run=clicks)
def one_table_products_in_the_old_order(module, root):
    module.weight.data[:, [1, 2]] = module.weight.data[:, [2, 1]]


@unseen(ranker, "", "scale", port=OneTableRanker, run=clicks)
def one_table_averaged(module, root):
    change(module, pooled=lambda self, pooled, rows: rows.mean(2))


right("ranker", ranker, "reordered", "bf16", run=clicks)
right("ranker of one table", ranker, *ALL, port=OneTableRanker, run=clicks)
