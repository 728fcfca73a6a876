"""Silero VAD with its trained weights: an engine's port against a plain implementation."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn import functional

from sealed.cases import Case, Pair
from sealed.three.common import BRAIN, FULL, HALF, Row, cases_of, change, exact, rough_sum
from sealed.three.silero_port import BINS, CHUNK, CONTEXT, Detector, Plain


@functools.cache
def _weights() -> dict[str, torch.Tensor]:
    spec = importlib.util.find_spec("silero_vad")
    assert spec is not None
    assert spec.origin is not None
    return load_file(Path(spec.origin).parent / "data" / "silero_vad_16k.safetensors")


def _wave(seed: int, chunks: int) -> torch.Tensor:
    """Return two voices of gliding harmonics with breaks and noise."""
    draw = torch.Generator().manual_seed(seed)
    time = torch.arange(chunks * CHUNK) / 16000
    voices = []
    for pitch in (120.0, 210.0):
        phase = 2 * torch.pi * (pitch * time + 12 * torch.sin(2 * torch.pi * 3 * time) / 6)
        tone = sum(torch.sin(k * phase) / k**0.7 for k in range(1, 18))
        loud = (0.6 + 0.4 * torch.sin(2 * torch.pi * 4.5 * time + pitch)).clamp(min=0)
        voices.append(0.12 * loud * tone + 0.004 * torch.randn(len(time), generator=draw))
    return torch.stack(voices)


def build(kind: str) -> Pair:
    """Return the port and the plain network; "steps" feeds chunk by chunk, "quiet" is quiet."""
    weights = _weights()
    reference = Plain()
    reference.load_state_dict(weights)
    exact(reference)
    cell = reference.lstm_cell
    biases = (cell.bias_ih + cell.bias_hh).data.bfloat16().half().float()
    # Both biases are trained; their rounded sum is what half precision holds.
    cell.bias_ih.data = biases - cell.bias_hh.data
    weights = reference.state_dict()
    candidate = Detector()
    candidate.load_state_dict(
        {
            "spectrum.basis": weights["stft_conv.weight"].squeeze(1).T,
            **{
                f"encoder.{at}.conv.{part}": weights[f"conv{at + 1}.{part}"]
                for at in range(4)
                for part in ("weight", "bias")
            },
            "rnn.gates.weight": torch.cat(
                (weights["lstm_cell.weight_ih"], weights["lstm_cell.weight_hh"]), 1
            ),
            "rnn.gates.bias": biases,
            "decoder.proj.weight": weights["final_conv.weight"].squeeze(-1),
            "decoder.proj.bias": weights["final_conv.bias"],
        }
    )
    wave = _wave(1, 6) * (0.01 if kind == "quiet" else 1.0)
    if kind != "steps":
        return Pair(candidate, reference, args=(wave,))

    def drive(model: torch.nn.Module) -> list:
        dtype = next(model.parameters()).dtype
        chunks = wave.to(dtype if dtype == torch.float64 else FULL).split(CHUNK, 1)
        return [model(chunk, at == 0) for at, chunk in enumerate(chunks)]

    return Pair(candidate, reference, drive=drive)


def _zero_padded(self, x):
    return functional.pad(x, (0, CONTEXT))


def _mirrored_with_edge(self, x):
    return torch.cat((x, x[:, -CONTEXT:].flip(1)), 1)


def _power(self, x):
    real, imaginary = x.float().split(BINS, -1)
    return (real * real + imaginary * imaginary).to(x.dtype)


def _interleaved(self, x):
    real, imaginary = x.float().unflatten(-1, (BINS, 2)).unbind(-1)
    return torch.sqrt(real * real + imaginary * imaginary).to(x.dtype)


def _rough_magnitude(self, x):
    real, imaginary = x.split(BINS, -1)
    return torch.sqrt((real * real) + (imaginary * imaginary))


def _padded_behind(self, x):
    return self.conv(functional.pad(x, (0, 2))).relu()


def _replicated(self, x):
    return self.conv(functional.pad(x, (1, 1), "replicate")).relu()


def _no_context(self, wave):
    return functional.pad(wave.unfold(1, CHUNK, CHUNK), (CONTEXT, 0))


def _context_of_front(self, wave):
    whole = torch.cat((self.context, wave), 1)
    self.context = wave[:, :CONTEXT]
    return whole.unfold(1, CONTEXT + CHUNK, CHUNK)


def _forgetful(self, features):
    outputs = []
    for x in features.unbind(1):
        hidden, cell = self.rnn(x, *self.state)
        outputs.append(hidden)
        self.state = torch.stack((hidden, torch.zeros_like(cell)))
    self.state = torch.stack((hidden, cell))
    return torch.stack(outputs, 1)


def _state_swapped(self, features):
    cell, hidden = self.state
    outputs = []
    for x in features.unbind(1):
        hidden, cell = self.rnn(x, hidden, cell)
        outputs.append(hidden)
    self.state = torch.stack((hidden, cell))
    return torch.stack(outputs, 1)


def _onnx_order(self, gates, cell):
    i, o, f, g = gates.chunk(4, -1)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def _forget_bias(self, gates, cell):
    i, f, g, o = gates.chunk(4, -1)
    cell = (f + 1).sigmoid() * cell + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def _cell_not_squashed(self, gates, cell):
    i, f, g, o = gates.chunk(4, -1)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell, cell


def _hard_gates(self, gates, cell):
    i, f, g, o = gates.chunk(4, -1)
    hard = functional.hardsigmoid
    cell = hard(f) * cell + hard(i) * g.tanh()
    return hard(o) * cell.tanh(), cell


def _rough_gates(self, x):
    columns = self.weight.T * x.unsqueeze(-1)
    return rough_sum(columns.transpose(-2, -1)).squeeze(-1) + self.bias


def _no_relu(self, hidden):
    return self.proj(hidden).sigmoid()


def _bias_of_input_only(model):
    biases = _weights()["lstm_cell.bias_ih"]
    model.rnn.gates.bias.copy_(biases.bfloat16())


def _kernel_flipped(model):
    weight = model.encoder[1].conv.weight
    weight.copy_(weight.flip(-1))


def _row_scaled(model):
    model.encoder[3].conv.weight[17].mul_(1.02)


def _recurrent_transposed(model):
    """Store the square blocks of the recurrent weight transposed."""
    blocks = model.rnn.gates.weight[:, 128:].unflatten(0, (4, 128))
    blocks.copy_(blocks.transpose(1, 2).clone())


def _window_twice(model):
    model.spectrum.basis.mul_(torch.hann_window(256).unsqueeze(1))


def _by_convolution(self, x):
    frames = functional.conv1d(self.padded(x).unsqueeze(1), self.basis.T.unsqueeze(1), stride=128)
    return self.magnitude(frames.transpose(1, 2)).transpose(1, 2)


def _by_columns(self, x):
    columns = functional.pad(x, (1, 1)).unfold(2, 3, self.conv.stride[0])
    flat = torch.einsum("bitk,oik->bot", columns, self.conv.weight)
    return (flat + self.conv.bias[:, None]).relu()


def _by_pictures(self, x):
    picture = x.unsqueeze(2).contiguous(memory_format=torch.channels_last)
    weight = self.conv.weight.unsqueeze(2)
    stride = (1, self.conv.stride[0])
    return functional.conv2d(picture, weight, self.conv.bias, stride, (0, 1)).squeeze(2).relu()


def _tanh_by_sigmoid(self, gates, cell):
    i, f, g, o = gates.chunk(4, -1)
    cell = i.sigmoid() * (2 * (2 * g).sigmoid() - 1) + f.sigmoid() * cell
    return (2 * (2 * cell).sigmoid() - 1) * o.sigmoid(), cell


def _all(model, **members):
    change(*model.encoder, **members)


ROWS = [
    Row(
        "padded_with_zeros",
        lambda model: change(model.spectrum, padded=_zero_padded),
        "spectrum",
        "the end is padded with zeros where it is mirrored",
    ),
    Row(
        "mirrored_with_edge",
        lambda model: change(model.spectrum, padded=_mirrored_with_edge),
        "spectrum",
        "the mirrored end repeats the last sample",
        HALF,
    ),
    Row(
        "power_spectrum",
        lambda model: change(model.spectrum, magnitude=_power),
        "spectrum",
        "powers are used where magnitudes are wanted",
    ),
    Row(
        "parts_interleaved",
        lambda model: change(model.spectrum, magnitude=_interleaved),
        "spectrum",
        "real and imaginary parts are taken as neighbours",
    ),
    Row(
        "window_twice",
        _window_twice,
        "spectrum",
        "the basis, which holds the window, is windowed again",
        HALF,
    ),
    Row(
        "padded_behind",
        lambda model: change(model.encoder[2], forward=_padded_behind),
        "encoder.2",
        "a strided convolution is padded behind only",
    ),
    Row(
        "padding_replicated",
        lambda model: change(model.encoder[0], forward=_replicated),
        "encoder.0",
        "a convolution is padded with its edges, not zeros",
    ),
    Row(
        "kernel_flipped",
        _kernel_flipped,
        "encoder.1.conv",
        "the kernel of a convolution runs backwards",
    ),
    Row(
        "row_scaled",
        _row_scaled,
        "encoder.3.conv",
        "one channel of a convolution is 2 % too large",
    ),
    Row(
        "gates_of_onnx",
        lambda model: change(model.rnn, step=_onnx_order),
        "rnn",
        "the gates are read in the order of ONNX",
    ),
    Row(
        "forget_bias",
        lambda model: change(model.rnn, step=_forget_bias),
        "rnn",
        "the forget gate gets a bias of one that is in no checkpoint",
        HALF,
    ),
    Row(
        "cell_not_squashed",
        lambda model: change(model.rnn, step=_cell_not_squashed),
        "rnn",
        "the output gate takes the cell without its tanh",
    ),
    Row(
        "hard_gates",
        lambda model: change(model.rnn, step=_hard_gates),
        "rnn",
        "the gates are hard sigmoids",
        BRAIN,
    ),
    Row(
        "bias_dropped",
        _bias_of_input_only,
        "rnn.gates",
        "the recurrent bias is not added to the input's",
    ),
    Row(
        "recurrent_transposed",
        _recurrent_transposed,
        "rnn.gates",
        "the recurrent weights, square by gate, are transposed",
    ),
    Row(
        "no_relu",
        lambda model: change(model.decoder, forward=_no_relu),
        "decoder",
        "the decoder has no relu before its row",
    ),
    Row(
        "context_dropped",
        lambda model: change(model, windows=_no_context),
        "",
        "chunks come without the samples before them",
    ),
    Row(
        "context_of_front",
        lambda model: change(model, windows=_context_of_front),
        "",
        "the context that is kept is the chunk's front, not its end",
        kind="steps",
    ),
    Row(
        "cell_forgotten",
        lambda model: change(model, recur=_forgetful),
        "",
        "the cell state starts at zero in every chunk",
    ),
    Row(
        "state_swapped",
        lambda model: change(model, recur=_state_swapped),
        "",
        "hidden and cell state change places between calls",
        kind="steps",
    ),
    Row(
        "magnitude_rounded",
        lambda model: change(model.spectrum, magnitude=_rough_magnitude),
        "spectrum",
        "squares are taken in float16, where small ones vanish",
        HALF,
        precision=True,
        kind="quiet",
    ),
    Row(
        "gates_rounded",
        lambda model: change(model.rnn.gates, forward=_rough_gates),
        "rnn.gates",
        "the product is summed in the dtype of the activations",
        BRAIN,
        precision=True,
    ),
    Row("clean"),
    Row("clean", dtype=BRAIN),
    Row("clean", dtype=HALF),
    Row("clean_quiet", dtype=HALF, kind="quiet"),
    Row("clean_steps", kind="steps"),
    Row("clean_steps", dtype=HALF, kind="steps"),
    Row("spectrum_by_convolution", lambda model: change(model.spectrum, forward=_by_convolution)),
    Row("convolutions_by_columns", lambda model: _all(model, forward=_by_columns)),
    Row("channels_last", lambda model: _all(model, forward=_by_pictures)),
    Row("tanh_by_sigmoid", lambda model: change(model.rnn, step=_tanh_by_sigmoid)),
]


def cases() -> Iterator[Case]:
    """Yield the cases of this architecture."""
    yield from cases_of("silero_vad", build, ROWS, trained=True)
