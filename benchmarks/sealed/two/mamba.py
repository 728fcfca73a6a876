"""Mamba of mambapy against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from mambapy import mamba as mambapy
from mambapy.pscan import pscan
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from transformers import DynamicCache, MambaConfig, MambaForCausalLM

from sealed.cases import Case, Pair
from sealed.two.common import (
    Edit,
    Family,
    copied,
    finish,
    paths,
    randomise,
    recode,
    reweighed,
    rounded,
    scaled_row,
    setting,
    tokens,
    zeroed,
)

DIM, LAYERS, VOCABULARY, STATES, RANK, KERNEL, EPS = 48, 3, 140, 8, 6, 4, 1e-5
INNER = 2 * DIM


class Mixer(mambapy.MambaBlock):
    """mambapy's block with its scan in float32, for weights in half precision."""

    def rate(self) -> Tensor:
        """Return the rate at which each state decays."""
        return -torch.exp(self.A_log.float())

    def step_size(self, delta: Tensor) -> Tensor:
        """Return the step size of each channel."""
        return F.softplus(delta @ self.dt_proj.weight.t() + self.dt_proj.bias)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what of x decides the step size, the input and the output."""
        sizes = [self.config.dt_rank, self.config.d_state, self.config.d_state]
        return torch.split(self.x_proj(x), sizes, dim=-1)

    def discretised(self, delta: Tensor, rate: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return decay and input factor of (..., channels, states)."""
        delta = delta.unsqueeze(-1)
        return torch.exp(delta * rate), delta * b.unsqueeze(-2)

    def skip(self, x: Tensor) -> Tensor:
        """Return what passes by the states."""
        return self.D.float() * x

    def scan(self, decay: Tensor, entering: Tensor) -> Tensor:
        """Return the states after each position."""
        return pscan(decay, entering)

    def ssm(self, x: Tensor, z: Tensor) -> Tensor:
        """Return what the states put out, for a whole sequence."""
        delta, b, c = self.parts(x)
        delta = self.step_size(delta)
        x, delta, b, c = (each.float() for each in (x, delta, b, c))
        decay, factor = self.discretised(delta, self.rate(), b)
        states = self.scan(decay, factor * x.unsqueeze(-1))
        y = (states @ c.unsqueeze(-1)).squeeze(-1) + self.skip(x)
        return y.to(z.dtype)

    def ssm_step(self, x: Tensor, h: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return what the states put out for one token, and the new states."""
        dtype = x.dtype
        delta, b, c = self.parts(x)
        delta = self.step_size(delta)
        x, delta, b, c = (each.float() for each in (x, delta, b, c))
        decay, factor = self.discretised(delta, self.rate(), b)
        entering = factor * x.unsqueeze(-1)
        h = entering if h is None else decay * h + entering
        y = (h @ c.unsqueeze(-1)).squeeze(-1) + self.skip(x)
        return y.to(dtype), h


class LanguageModel(nn.Module):
    """Embeddings, mambapy's layers and a head; reads a sequence at once or token by token."""

    def __init__(self) -> None:
        super().__init__()
        config = mambapy.MambaConfig(
            DIM, LAYERS, dt_rank=RANK, d_state=STATES, d_conv=KERNEL, rms_norm_eps=EPS
        )
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.core = mambapy.Mamba(config)
        for layer in self.core.layers:
            layer.mixer.__class__ = Mixer
        self.norm_f = mambapy.RMSNorm(DIM, EPS)
        self.lm_head = nn.Linear(DIM, VOCABULARY, bias=False)
        self.lm_head.weight = self.embedding.weight
        self.caches: list[Any] = []

    def forward(self, tokens: Tensor, start: int | None = None) -> Tensor:
        """Return logits: of a sequence, or of one token at a position."""
        x = self.embedding(tokens)
        if start is None:
            x = self.core(x)
        else:
            if start == 0:
                inputs = x.new_zeros(x.shape[0], INNER, KERNEL - 1)
                self.caches = [(None, inputs) for _ in range(LAYERS)]
            x, self.caches = self.core.step(x[:, 0], self.caches)
            x = x[:, None]
        return self.lm_head(self.norm_f(x))


class Reference(nn.Module):
    """transformers' Mamba, called as the port is."""

    def __init__(self, model: MambaForCausalLM) -> None:
        super().__init__()
        self.model = model
        self.cache: Any = None

    def forward(self, tokens: Tensor, start: int | None = None) -> Tensor:
        """Return logits: of a sequence, or of one token at a position."""
        if start is None:
            return self.model(tokens, use_cache=False).logits
        if start == 0:
            self.cache = DynamicCache(config=self.model.config)
        return self.model(tokens, cache_params=self.cache, use_cache=True).logits


def converted(state: dict[str, Tensor]) -> LanguageModel:
    """Return the port with the weights of transformers'."""
    model, renamed = LanguageModel(), {}
    for name, weight in state.items():
        name = name.replace("backbone.layers", "core.layers").removeprefix("backbone.")
        renamed[name.replace("embeddings", "embedding")] = weight.clone()
    model.load_state_dict(renamed)
    return model


def decode(model: nn.Module) -> Tensor:
    """Read token by token."""
    text = tokens(22, 2, 12, below=VOCABULARY)
    return torch.cat([model(text[:, at : at + 1], at) for at in range(12)], dim=1)


def build(dtype: torch.dtype, edit: Edit | None, drive: Any = None, long: bool = False) -> Pair:
    """Return mambapy's model against transformers'."""
    config = MambaConfig(
        vocab_size=VOCABULARY,
        hidden_size=DIM,
        state_size=STATES,
        num_hidden_layers=LAYERS,
        time_step_rank=RANK,
        conv_kernel=KERNEL,
        layer_norm_epsilon=EPS,
        tie_word_embeddings=True,
    )
    model = randomise(MambaForCausalLM(config), 6, gain=0.9, embedding=0.25)
    generator = torch.Generator().manual_seed(7)
    for layer in model.backbone.layers:
        mixer = layer.mixer
        decays = torch.arange(1, STATES + 1).float().expand(INNER, -1)
        spread = 0.2 * torch.randn(mixer.A_log.shape, generator=generator)
        mixer.A_log.data = torch.log(decays * (0.01 if long else 0.3)) + spread
        mixer.D.data = 0.7 + 0.3 * torch.randn(INNER, generator=generator)
        mixer.dt_proj.bias.data -= 1
        if long:  # small steps and far memory, as in trained models
            mixer.dt_proj.bias.data -= 3
            mixer.x_proj.weight.data[RANK:] *= 2.5
            mixer.D.data *= 0.3
    rounded(model, dtype)
    candidate, reference = finish(converted(model.state_dict()), Reference(model), dtype, edit)
    args = () if drive else (tokens(21, 2, 64 if long else 18, below=VOCABULARY),)
    return Pair(candidate, reference, args, drive=drive)


class _RateWithoutExp(Mixer):
    def rate(self) -> Tensor:
        return -self.A_log.float().abs()


class _NoSkip(Mixer):
    def skip(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


class _NoStepBias(Mixer):
    def step_size(self, delta: Tensor) -> Tensor:
        return F.softplus(delta @ self.dt_proj.weight.t())


class _ExpStep(Mixer):
    def step_size(self, delta: Tensor) -> Tensor:
        return torch.exp(delta @ self.dt_proj.weight.t() + self.dt_proj.bias)


class _ExactHold(Mixer):
    def discretised(self, delta: Tensor, rate: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        decay = torch.exp(delta.unsqueeze(-1) * rate)
        return decay, (decay - 1) / rate * b.unsqueeze(-2)


class _PartsExchanged(Mixer):
    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        delta, b, c = super().parts(x)
        return delta, c, b


class _SequentialScan(Mixer):
    def scan(self, decay: Tensor, entering: Tensor) -> Tensor:
        h, states = torch.zeros_like(entering[:, 0]), []
        for at in range(entering.shape[1]):
            h = decay[:, at] * h + entering[:, at]
            states.append(h)
        return torch.stack(states, dim=1)


class _NarrowScan(_SequentialScan):
    def scan(self, decay: Tensor, entering: Tensor) -> Tensor:
        dtype = self.out_proj.weight.dtype
        return super().scan(decay.to(dtype), entering.to(dtype)).to(entering.dtype)


class _NaiveStep(Mixer):
    def step_size(self, delta: Tensor) -> Tensor:
        return torch.log(1 + torch.exp(delta @ self.dt_proj.weight.t() + self.dt_proj.bias))


class _LateScan(Mixer):
    def scan(self, decay: Tensor, entering: Tensor) -> Tensor:
        return F.pad(super().scan(decay, entering), (0, 0, 0, 0, 1, -1))


class _LookingAhead(Mixer):
    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        x, z = self.in_proj(x).chunk(2, dim=-1)
        x = self.conv1d(x.transpose(1, 2))[:, :, 1 : length + 1].transpose(1, 2)
        x = F.silu(x)
        return self.out_proj(self.ssm(x, z) * F.silu(z))


class _GateBeforeScan(Mixer):
    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        x, z = self.in_proj(x).chunk(2, dim=-1)
        x = self.conv1d(x.transpose(1, 2))[:, :, :length].transpose(1, 2)
        return self.out_proj(self.ssm(F.silu(x), z) * torch.sigmoid(z))


class _NoActivation(Mixer):
    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        x, z = self.in_proj(x).chunk(2, dim=-1)
        x = self.conv1d(x.transpose(1, 2))[:, :, :length].transpose(1, 2)
        return self.out_proj(self.ssm(x, z) * F.silu(z))


class _ForgottenState(Mixer):
    def ssm_step(self, x: Tensor, h: Tensor | None) -> tuple[Tensor, Tensor]:
        return super().ssm_step(x, None)


class _StaleInputs(Mixer):
    def step(self, x: Tensor, cache: tuple[Any, Tensor]) -> tuple[Tensor, tuple[Any, Tensor]]:
        _, inputs = cache
        output, (h, rolled) = super().step(x, cache)
        return output, (h, torch.cat([rolled[:, :, -1:], inputs[:, :, :-1]], dim=2))


class _ActivatedInputs(Mixer):
    def step(self, x: Tensor, cache: tuple[Any, Tensor]) -> tuple[Tensor, tuple[Any, Tensor]]:
        output, (h, inputs) = super().step(x, cache)
        return output, (h, torch.cat([inputs[:, :, :-1], F.silu(inputs[:, :, -1:])], dim=2))


class _NormedResidual(mambapy.ResidualBlock):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.mixer(x) + x


class _KeptRate(Mixer):
    def rate(self) -> Tensor:
        return self.decay


def _keep_rate(model: nn.Module) -> None:
    for layer in model.core.layers:
        mixer = layer.mixer
        mixer.register_buffer("decay", -torch.exp(mixer.A_log.float()))
        mixer.__class__ = _KeptRate
        del mixer.A_log


def _fold_norm(model: nn.Module) -> None:
    for layer in model.core.layers:
        layer.mixer.in_proj.weight *= layer.norm.weight
        layer.norm.weight.fill_(1)


def _own_head(model: nn.Module) -> None:
    """Untie the head and load what an older checkpoint had there: the rows one off."""
    model.lm_head.weight = nn.Parameter(model.embedding.weight.roll(1, 0))


def _unused(model: nn.Module) -> None:
    model.add_module("old_head", randomise(nn.Linear(DIM, VOCABULARY), 8))
    model.register_buffer("position_ids", torch.arange(64))


def _b_after_c(weight: Tensor) -> Tensor:
    delta, b, c = weight.split([RANK, STATES, STATES])
    return torch.cat((delta, c, b))


def cases() -> Iterator[Case]:
    """Yield the cases of Mamba."""
    bf16, f16 = torch.bfloat16, torch.float16
    family = Family("mamba", build)
    fault, harmless = family.fault, family.harmless
    mixers = paths("core.layers.{}.mixer", LAYERS)
    norms = (*paths("core.layers.{}.norm", LAYERS), "norm_f")

    yield fault("rate-without-exp", recode(_RateWithoutExp, *mixers), mixers, "A_log taken as A")
    yield fault("skip-missing", recode(_NoSkip, mixers[1]), mixers[1], "D times x is missing")
    yield fault(
        "step-bias-missing", recode(_NoStepBias, *mixers), mixers, "bias of the step size missing",
        dtype=bf16,
    )  # fmt: skip
    yield fault(
        "step-exp", recode(_ExpStep, mixers[0]), mixers[0], "exp instead of softplus", dtype=f16
    )
    yield fault(
        "exact-hold",
        recode(_ExactHold, *mixers),
        mixers,
        "exact zero-order hold of the input, where the model takes Euler's",
    )
    yield fault(
        "b-c-exchanged", recode(_PartsExchanged, *mixers), mixers, "B and C exchanged in the split"
    )
    yield fault(
        "x-proj-rows",
        reweighed("core.layers.1.mixer.x_proj", _b_after_c),
        "core.layers.1.mixer.x_proj",
        "rows of B and C exchanged by the conversion",
        dtype=bf16,
    )
    yield fault(
        "in-proj-halves",
        reweighed("core.layers.2.mixer.in_proj", lambda w: w.roll(INNER, 0)),
        "core.layers.2.mixer.in_proj",
        "input and gate exchanged by the conversion",
    )
    yield fault("scan-late", recode(_LateScan, mixers[1]), mixers[1], "states read one step late")
    yield fault(
        "conv-looks-ahead",
        recode(_LookingAhead, *mixers),
        mixers,
        "output of the convolution cut off by one, so it sees the next token",
    )
    yield fault(
        "gate-sigmoid", recode(_GateBeforeScan, mixers[2]), mixers[2], "gate is sigmoid, not SiLU"
    )
    yield fault(
        "activation-missing",
        recode(_NoActivation, mixers[0]),
        mixers[0],
        "no activation after the convolution",
    )
    yield fault(
        "conv-bias-dropped",
        zeroed("core.layers.0.mixer.conv1d"),
        "core.layers.0.mixer.conv1d",
        "bias of the convolution not converted",
    )
    yield fault(
        "conv-flipped",
        reweighed("core.layers.1.mixer.conv1d", lambda w: w.flip(-1)),
        "core.layers.1.mixer.conv1d",
        "kernel in reverse order",
        dtype=f16,
    )
    yield fault("eps", setting("eps", 1e-6, *norms), norms, "eps 1e-6 in all norms, not 1e-5")
    yield fault(
        "residual-normed",
        recode(_NormedResidual, "core.layers.1"),
        "core.layers.1",
        "residual taken after the norm",
    )
    yield fault("head-untied", _own_head, "lm_head", "head loaded apart from the embeddings")
    yield fault(
        "dt-of-other-layer",
        copied("core.layers.2.mixer.dt_proj", "core.layers.1.mixer.dt_proj"),
        "core.layers.2.mixer.dt_proj",
        "step sizes of layer 1 loaded into layer 2",
    )
    yield fault(
        "out-proj-row",
        reweighed("core.layers.0.mixer.out_proj", scaled_row(5, 1.005)),
        "core.layers.0.mixer.out_proj",
        "one row of a weight is 0.5 % too large",
    )
    yield fault(
        "decode-state-lost",
        recode(_ForgottenState, mixers[1]),
        mixers[1],
        "state not carried from step to step",
        drive=decode,
    )
    yield fault(
        "decode-inputs-reversed",
        recode(_StaleInputs, *mixers),
        mixers,
        "window of the convolution filled from the wrong end",
        drive=decode,
        dtype=bf16,
    )
    yield fault(
        "decode-inputs-activated",
        recode(_ActivatedInputs, *mixers),
        mixers,
        "window keeps inputs after the activation",
        drive=decode,
    )
    yield fault(
        "scan-narrow",
        recode(_NarrowScan, *mixers),
        mixers,
        "states kept in bfloat16",
        dtype=bf16,
        precision=True,
        long=True,
    )
    yield fault(
        "softplus-naive",
        recode(_NaiveStep, *mixers),
        mixers,
        "one plus a small number in bfloat16",
        dtype=bf16,
        precision=True,
        long=True,
    )

    yield harmless("clean")
    yield harmless("clean-long", dtype=bf16, long=True)
    yield harmless("clean", dtype=f16)
    yield harmless("sequential-scan", recode(_SequentialScan, *mixers))
    yield harmless("decode", drive=decode, dtype=bf16)
    yield harmless("rate-kept", _keep_rate)
    yield harmless("norm-folded", _fold_norm)
    yield harmless("unused-weights", _unused, drive=decode)
