"""The GPT-2 by other people: projections split, and weights transposed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import models
from localisation.copies import Residual, linear, norm_like

# --- GPT-2: projections split, SDPA; and once more with transposed weights and einsum -------------


class SplitBlock(nn.Module):
    """A block with q, k and v of their own and SDPA."""

    def __init__(self, block: models.GPTBlock) -> None:
        super().__init__()
        weights, biases = block.attn.c_attn.weight.chunk(3), block.attn.c_attn.bias.chunk(3)
        self.heads = block.attn.heads
        self.norm_a = norm_like(block.ln_1)
        self.k_lin = linear(weights[1], bias=biases[1])
        self.q_lin = linear(weights[0], bias=biases[0])
        self.v_lin = linear(weights[2], bias=biases[2])
        self.o_lin = linear(block.attn.c_proj.weight, bias=block.attn.c_proj.bias)
        self.norm_b = norm_like(block.ln_2)
        self.ff = nn.Sequential(
            linear(block.mlp.c_fc.weight, bias=block.mlp.c_fc.bias),
            nn.GELU(),
            linear(block.mlp.c_proj.weight, bias=block.mlp.c_proj.bias),
        )

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        h = self.norm_a(x)
        k, q, v = (
            each(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in (self.k_lin, self.q_lin, self.v_lin)
        )
        x = x + self.o_lin(self.mixed(q, k, v, bias).transpose(1, 2).flatten(2))
        return x + self.ff(self.norm_b(x))

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


class SplitGPT(nn.Module):
    """The GPT-2 with split projections; the mask is added."""

    def __init__(self, model: models.GPT2) -> None:
        super().__init__()
        self.token = nn.Embedding.from_pretrained(model.wte.weight.detach().clone(), freeze=False)
        self.place = nn.Parameter(model.wpe.weight.detach().clone())
        self.body = nn.ModuleList(SplitBlock(each) for each in model.h)
        self.final = norm_like(model.ln_f)
        self.logits = linear(model.lm_head.weight)

    def forward(self, ids: Tensor, keep: Tensor | None = None) -> Tensor:
        x = self.placed(self.token(ids))
        bias = self.added(ids.shape[1], keep, x)
        for block in self.body:
            x = block(x, bias)
        return self.logits(self.final(x))

    def placed(self, x: Tensor) -> Tensor:
        return x + self.place[: x.shape[1]]

    def added(self, length: int, keep: Tensor | None, x: Tensor) -> Tensor:
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        if keep is not None:
            hidden = hidden | ~keep[:, None, None, :]
        return torch.zeros(hidden.shape, dtype=x.dtype).masked_fill(
            hidden, torch.finfo(x.dtype).min
        )


class Conv1D(nn.Module):
    """A linear layer that holds its weight transposed."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().t().contiguous())
        self.bias = nn.Parameter(linear.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        return torch.addmm(self.bias, flat, self.weight).view(*x.shape[:-1], -1)


class ConvAttention(nn.Module):
    """Attention by einsum, heads third, rows of queries last in the weights."""

    def __init__(self, attention: models.GPTAttention) -> None:
        super().__init__()
        self.n = attention.heads
        self.attn = Conv1D(attention.c_attn)
        self.proj = Conv1D(attention.c_proj)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attn(x).unflatten(-1, (3, self.n, -1)).unbind(2)
        weights = self.weights(q, k)
        return self.proj(torch.einsum("bhts,bshd->bthd", weights, v).flatten(2))

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        scores = torch.einsum("bthd,bshd->bhts", q / q.shape[-1] ** 0.5, k)
        future = torch.arange(k.shape[1])[None] > torch.arange(q.shape[1])[:, None]
        return scores.masked_fill(future, -1e30).softmax(-1)


class ConvFeed(nn.Module):
    """The feed-forward with GELU as a function."""

    def __init__(self, feed: models.GPTFeed) -> None:
        super().__init__()
        self.fc = Conv1D(feed.c_fc)
        self.proj = Conv1D(feed.c_proj)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.act(self.fc(x)))

    def act(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.erf(x * 0.5**0.5))


class ConvGPT(nn.Module):
    """The GPT-2 with transposed weights."""

    def __init__(self, model: models.GPT2) -> None:
        super().__init__()
        self.embed = nn.ModuleDict({"tokens": nn.Embedding(*model.wte.weight.shape)})
        self.embed["tokens"].weight.data.copy_(model.wte.weight)
        self.embed["places"] = nn.Embedding(*model.wpe.weight.shape)
        self.embed["places"].weight.data.copy_(model.wpe.weight)
        self.sublayers = nn.ModuleList()
        for block in model.h:
            self.sublayers.append(Residual(norm_like(block.ln_1), ConvAttention(block.attn)))
            self.sublayers.append(Residual(norm_like(block.ln_2), ConvFeed(block.mlp)))
        self.norm = norm_like(model.ln_f)
        self.out = nn.Parameter(model.lm_head.weight.detach().clone())

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed["tokens"](ids) + self.embed["places"](torch.arange(ids.shape[1]))
        for each in self.sublayers:
            x = each(x)
        return torch.matmul(self.norm(x), self.out.T)
