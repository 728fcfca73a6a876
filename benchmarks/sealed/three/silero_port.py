"""Silero VAD twice: plain, chunk by chunk, and as an engine runs it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

CHUNK, CONTEXT, BINS = 512, 64, 129


class Plain(nn.Module):
    """The network chunk by chunk, as the package's own listing has it."""

    def __init__(self) -> None:
        super().__init__()
        self.stft_conv = nn.Conv1d(1, 2 * BINS, 256, stride=128, bias=False)
        self.conv1 = nn.Conv1d(BINS, 128, 3, padding=1)
        self.conv2 = nn.Conv1d(128, 64, 3, stride=2, padding=1)
        self.conv3 = nn.Conv1d(64, 64, 3, stride=2, padding=1)
        self.conv4 = nn.Conv1d(64, 128, 3, padding=1)
        self.lstm_cell = nn.LSTMCell(128, 128)
        self.final_conv = nn.Conv1d(128, 1, 1)
        self.kept = None

    def forward(self, wave: torch.Tensor, fresh: bool = True):
        """Return each chunk's probability and the last state."""
        state, context = (None, torch.zeros_like(wave[:, :CONTEXT])) if fresh else self.kept
        found = []
        for chunk in wave.split(CHUNK, 1):
            x = functional.pad(torch.cat((context, chunk), 1), (0, CONTEXT), "reflect")
            context = chunk[:, -CONTEXT:]
            x = self.stft_conv(x.unsqueeze(1))
            x = (x[:, :BINS] ** 2 + x[:, BINS:] ** 2).sqrt()
            x = self.conv1(x).relu()
            x = self.conv2(x).relu()
            x = self.conv3(x).relu()
            x = self.conv4(x).relu().squeeze(-1)
            state = self.lstm_cell(x, state)
            found.append(self.final_conv(state[0].unsqueeze(-1).relu()).sigmoid().flatten(1))
        self.kept = state, context
        return torch.cat(found, 1), *state


class Spectrum(nn.Module):
    """Magnitudes of windowed frames, by one product."""

    def __init__(self) -> None:
        super().__init__()
        self.basis = nn.Parameter(torch.empty(256, 2 * BINS))

    def padded(self, x: torch.Tensor) -> torch.Tensor:
        """Mirror the end."""
        return torch.cat((x, x[:, -CONTEXT - 1 : -1].flip(1)), 1)

    def magnitude(self, x: torch.Tensor) -> torch.Tensor:
        """Return magnitudes of real parts followed by imaginary ones."""
        real, imaginary = x.float().split(BINS, -1)
        return torch.sqrt(real * real + imaginary * imaginary).to(x.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, bins, frames) of samples."""
        frames = self.padded(x).unfold(1, 256, 128)
        return self.magnitude(frames @ self.basis).transpose(1, 2)


class Stage(nn.Module):
    """A convolution and its relu."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, 3, stride=stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the features, padded by one on either side."""
        return self.conv(functional.pad(x, (1, 1))).relu()


class Recurrence(nn.Module):
    """An LSTM step over one fused product of input and state."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Linear(256, 512)

    def step(self, gates: torch.Tensor, cell: torch.Tensor):
        """Return the state after gates in the order input, forget, cell, output."""
        i, f, g, o = gates.chunk(4, -1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        return o.sigmoid() * cell.tanh(), cell

    def forward(self, x: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor):
        """Return the next hidden and cell state."""
        return self.step(self.gates(torch.cat((x, hidden), -1)), cell)


class Decoder(nn.Module):
    """A relu, a row and a sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(128, 1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the probability of speech."""
        return self.proj(hidden.relu()).sigmoid()


class Detector(nn.Module):
    """The port: all chunks go through the encoder at once, then step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.spectrum = Spectrum()
        shapes = ((BINS, 128, 1), (128, 64, 2), (64, 64, 2), (64, 128, 1))
        self.encoder = nn.Sequential(*(Stage(*shape) for shape in shapes))
        self.rnn = Recurrence()
        self.decoder = Decoder()
        self.register_buffer("context", torch.zeros(1, CONTEXT), persistent=False)
        self.register_buffer("state", torch.zeros(2, 1, 128), persistent=False)

    def reset(self, wave: torch.Tensor) -> None:
        """Begin anew."""
        self.context = torch.zeros_like(wave[:, :CONTEXT])
        self.state = wave.new_zeros(2, len(wave), 128)

    def windows(self, wave: torch.Tensor) -> torch.Tensor:
        """Return chunks, each behind the end of the one before."""
        whole = torch.cat((self.context, wave), 1)
        self.context = whole[:, -CONTEXT:]
        return whole.unfold(1, CONTEXT + CHUNK, CHUNK)

    def recur(self, features: torch.Tensor) -> torch.Tensor:
        """Run the recurrence over (batch, chunks, features)."""
        hidden, cell = self.state
        outputs = []
        for x in features.unbind(1):
            hidden, cell = self.rnn(x, hidden, cell)
            outputs.append(hidden)
        self.state = torch.stack((hidden, cell))
        return torch.stack(outputs, 1)

    def forward(self, wave: torch.Tensor, fresh: bool = True):
        """Return each chunk's probability and the last state."""
        wave = wave.to(self.spectrum.basis.dtype)
        if fresh:
            self.reset(wave)
        windows = self.windows(wave)
        features = self.encoder(self.spectrum(windows.flatten(0, 1))).squeeze(-1)
        outputs = self.recur(features.unflatten(0, windows.shape[:2]))
        return self.decoder(outputs).squeeze(-1), *self.state.unbind(0)
