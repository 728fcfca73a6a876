"""The decoder of EnCodec: codes of several books, causal convolutions, an LSTM, larger steps.

The port has one table for all books and no weight norm; it lays windows over each other where the
model transposes a convolution, and steps through the LSTM by itself.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import drives, models
from localisation.copies import linear
from localisation.planting import change
from localisation.unseen_fifth import BOTH, fifth, harmless

BOOKS, CODES, DIM = 3, 40, 32


def coded(dtype: torch.dtype) -> drives.Run:
    """One call on twelve frames of codes."""
    generator = torch.Generator().manual_seed(2057)
    return drives.Run((torch.randint(CODES, (2, BOOKS, 12), generator=generator),))


class NormedConv1d(nn.Module):
    """Pads in front only, by reflection; each output's weight has a length of its own."""

    def __init__(self, given: int, out: int, size: int, dilation: int = 1) -> None:
        super().__init__()
        self.weight_g = nn.Parameter(torch.ones(out, 1, 1))
        self.weight_v = nn.Parameter(torch.zeros(out, given, size))
        self.bias, self.dilation = nn.Parameter(torch.zeros(out)), dilation

    def forward(self, x: Tensor) -> Tensor:
        before = (self.weight_v.shape[2] - 1) * self.dilation
        return F.conv1d(self.padded(x, before), self.weight(), self.bias, dilation=self.dilation)

    def padded(self, x: Tensor, before: int) -> Tensor:
        return F.pad(x, (before, 0), mode="reflect")

    def weight(self) -> Tensor:
        return self.weight_v * (self.weight_g / self.weight_v.norm(dim=(1, 2), keepdim=True))


class NormedConvTranspose1d(nn.Module):
    """What it makes too much is cut off at the end."""

    def __init__(self, given: int, out: int, stride: int) -> None:
        super().__init__()
        self.weight_g = nn.Parameter(torch.ones(given, 1, 1))
        self.weight_v = nn.Parameter(torch.zeros(given, out, 2 * stride))
        self.bias, self.stride = nn.Parameter(torch.zeros(out)), stride

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight_v * (self.weight_g / self.weight_v.norm(dim=(1, 2), keepdim=True))
        return self.cut(F.conv_transpose1d(x, weight, self.bias, self.stride))

    def cut(self, x: Tensor) -> Tensor:
        return x[..., : x.shape[-1] - self.stride]


class EncodecLSTM(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(2, 0, 1)
        return (self.lstm(x)[0] + x).permute(1, 2, 0)


class EncodecResnetBlock(nn.Module):
    def __init__(self, dim: int, dilation: int) -> None:
        super().__init__()
        self.conv1 = NormedConv1d(dim, dim // 2, 3, dilation)
        self.conv2 = NormedConv1d(dim // 2, dim, 1)
        self.shortcut = NormedConv1d(dim, dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.conv2(F.elu(self.conv1(F.elu(x))))


class EncodecQuantizer(nn.Module):
    """The vectors of all books are added."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Embedding(CODES, DIM) for _ in range(BOOKS))

    def forward(self, codes: Tensor) -> Tensor:
        total = 0
        for n, layer in enumerate(self.layers):
            total = total + layer(codes[:, n])
        return total.transpose(1, 2)


class Encodec(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quantizer = EncodecQuantizer()
        self.conv_in, self.lstm = NormedConv1d(DIM, DIM, 7), EncodecLSTM(DIM)
        self.ups = nn.ModuleList(
            (NormedConvTranspose1d(32, 16, 4), NormedConvTranspose1d(16, 8, 2))
        )
        self.blocks = nn.ModuleList((EncodecResnetBlock(16, 2), EncodecResnetBlock(8, 1)))
        self.conv_out = NormedConv1d(8, 1, 7)

    def forward(self, codes: Tensor) -> Tensor:
        x = self.lstm(self.conv_in(self.quantizer(codes)))
        for up, block in zip(self.ups, self.blocks, strict=True):
            x = block(up(F.elu(x)))
        return self.conv_out(F.elu(x))


def encodec(*, outliers: bool = False) -> nn.Module:
    model = models.weigh(Encodec(), 510, outliers)
    generator = torch.Generator().manual_seed(511)
    for module in model.modules():
        if isinstance(module, NormedConv1d | NormedConvTranspose1d):
            noise = torch.rand(module.weight_g.shape, generator=generator)
            module.weight_g.data = 0.7 + 0.8 * noise
    for number, layer in enumerate(model.quantizer.layers):
        layer.weight.data *= 0.6**number
    return model


class Books(nn.Module):
    """One table; each book starts where the one before ends."""

    def __init__(self, of: EncodecQuantizer) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.cat([each.weight.detach() for each in of.layers]))

    def forward(self, codes: Tensor) -> Tensor:
        numbers = codes.mT + self.starts()
        return F.embedding_bag(numbers.flatten(0, 1), self.table, mode="sum").view(
            *codes.shape[::2], -1
        )

    def starts(self) -> Tensor:
        return torch.arange(BOOKS) * CODES


class Causal(nn.Module):
    """A product of windows, channels last."""

    def __init__(self, of: NormedConv1d) -> None:
        super().__init__()
        self.size, self.dilation = of.weight_v.shape[2], of.dilation
        self.proj = linear(of.weight().detach().flatten(1), bias=of.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        length, before = x.shape[1], (self.size - 1) * self.dilation
        x = self.filled(x, before)
        taps = [x[:, n * self.dilation : n * self.dilation + length] for n in range(self.size)]
        return self.proj(torch.stack(taps, -1).flatten(2))

    def filled(self, x: Tensor, before: int) -> Tensor:
        return torch.cat((x[:, 1 : before + 1].flip(1), x), 1)


class Overlap(nn.Module):
    """Each frame gives two steps' worth; the second half is added to the next frame's first."""

    def __init__(self, of: NormedConvTranspose1d) -> None:
        super().__init__()
        weight = of.weight_v / of.weight_v.norm(dim=(1, 2), keepdim=True) * of.weight_g
        self.frames = linear(weight.detach().permute(2, 1, 0).flatten(0, 1))
        self.bias, self.stride = nn.Parameter(of.bias.detach().clone()), of.stride

    def forward(self, x: Tensor) -> Tensor:
        now, later = self.frames(x).unflatten(-1, (2, self.stride, -1)).unbind(2)
        return self.laid(now, later).flatten(1, 2) + self.bias

    def laid(self, now: Tensor, later: Tensor) -> Tensor:
        return now + F.pad(later, (0, 0, 0, 0, 1, 0))[:, :-1]


class Steps(nn.Module):
    """The LSTM, step by step, and what it was given."""

    def __init__(self, of: nn.LSTM) -> None:
        super().__init__()
        bias = (of.bias_ih_l0 + of.bias_hh_l0).detach()
        self.given, self.kept = linear(of.weight_ih_l0, bias=bias), linear(of.weight_hh_l0)

    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.zeros_like(x[:, 0])
        outs = []
        for given in self.given(x).unbind(1):
            i, f, g, o = self.gates(given + self.kept(h))
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outs.append(h)
        return self.summed(torch.stack(outs, 1), x)

    def gates(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.chunk(4, -1)

    def summed(self, out: Tensor, x: Tensor) -> Tensor:
        return out + x


class Up(nn.Module):
    """A larger step and the block after it, whose shortcut comes last."""

    def __init__(self, up: NormedConvTranspose1d, block: EncodecResnetBlock) -> None:
        super().__init__()
        self.larger, self.c1, self.c2 = Overlap(up), Causal(block.conv1), Causal(block.conv2)
        self.short = Causal(block.shortcut)

    def forward(self, x: Tensor) -> Tensor:
        x = self.larger(F.elu(x))
        return self.c2(F.elu(self.c1(F.elu(x)))) + self.shortcut(x)

    def shortcut(self, x: Tensor) -> Tensor:
        return self.short(x)


class PlainEncodec(nn.Module):
    def __init__(self, model: Encodec) -> None:
        super().__init__()
        self.books, self.first = Books(model.quantizer), Causal(model.conv_in)
        self.steps, self.last = Steps(model.lstm.lstm), Causal(model.conv_out)
        self.up1, self.up2 = (Up(*each) for each in zip(model.ups, model.blocks, strict=True))

    def forward(self, codes: Tensor) -> Tensor:
        x = self.up2(self.up1(self.steps(self.first(self.books(codes)))))
        return self.last(self.act(x)).mT

    def act(self, x: Tensor) -> Tensor:
        return F.elu(x)


def decoded(path, kind, **more):
    """Declare a fault of the codec."""
    return fifth(encodec, path, kind, run=coded, **more)


@decoded("books", "weights", port=PlainEncodec, regimes=BOTH)
def encodec_last_book_read_twice(module, root):
    change(module, starts=lambda self, starts: torch.tensor([0, CODES, CODES]))


@decoded("first", "padding", port=PlainEncodec, regimes=BOTH)
def encodec_zeros_in_front(module, root):
    change(module, filled=lambda self, filled, x, before: F.pad(x, (0, 0, before, 0)))


@decoded("up1.c1", "padding", port=PlainEncodec)
def encodec_edge_reflected_with_itself(module, root):
    def filled(self, filled, x, before):
        return torch.cat((x[:, :before].flip(1), x), 1)

    change(module, filled=filled)


@decoded("up1.c1", "weights", port=PlainEncodec)
def encodec_not_dilated(module, root):
    module.dilation = 1


@decoded("up2.larger", "layouts", port=PlainEncodec, regimes=BOTH)
def encodec_cut_at_the_front(module, root):
    def laid(self, laid, now, later):
        return F.pad(now, (0, 0, 0, 0, 0, 1))[:, 1:] + later

    change(module, laid=laid)


@decoded("up1.larger.frames", "weights", port=PlainEncodec)
def encodec_length_of_outputs(module, root):
    up = encodec().ups[0]
    weight = up.weight_v / up.weight_v.norm(dim=(0, 2), keepdim=True) * up.weight_g
    module.weight.data = weight.detach().permute(2, 1, 0).flatten(0, 1).contiguous()


@decoded("steps", "activations", port=PlainEncodec)
def encodec_gates_in_another_order(module, root):
    def gates(self, gates, x):
        i, f, o, g = gates(x)
        return i, f, g, o

    change(module, gates=gates)


@decoded("steps", "residuals", port=PlainEncodec)
def encodec_lstm_without_skip(module, root):
    change(module, summed=lambda self, summed, out, x: out)


@decoded("up2", "activations", port=PlainEncodec)
def encodec_shortcut_after_the_activation(module, root):
    change(module, shortcut=lambda self, shortcut, x: self.short(F.elu(x)))


@decoded("", "activations", port=PlainEncodec)
def encodec_leaky_at_the_end(module, root):
    change(module, act=lambda self, act, x: F.leaky_relu(x, 0.1))


@decoded("ups.1", "padding", against=PlainEncodec)
def encodec_cut_on_both_sides(module, root):
    change(module, cut=lambda self, cut, x: x[..., 1:-1])


@decoded("blocks.0.conv1", "weights", against=PlainEncodec)
def encodec_length_without_taps(module, root):
    def weight(self, weight):
        return self.weight_v * (self.weight_g / self.weight_v.norm(dim=1, keepdim=True))

    change(module, weight=weight)


harmless("encodec plain", encodec, "same", "bf16", port=PlainEncodec, run=coded)
harmless("encodec against plain", encodec, "same", against=PlainEncodec, run=coded)
