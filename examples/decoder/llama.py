"""A small Llama whose decode step is a plan of kernels, and the same with a kernel of one's own."""

from brickline.decoder import Decoder
from brickline.decoder_weights import DecoderConfig, random_weights
from brickline.kernels.rotary import rope_append

CONFIG = DecoderConfig(
    vocabulary=512, dim=128, hidden=352, layers=2, heads=8, kv_heads=2, head_dim=16
)
WEIGHTS = random_weights(CONFIG, dtype="f32", seed=1)


def stock(device="CPU", executor="serial", **options):
    """Return the decoder as it ships."""
    return Decoder(CONFIG, dtype="f32").prepare(WEIGHTS, device, executor, **options)


def mine(device="CPU", executor="serial", **options):
    """Return it with a rope of my own, which turns neighbours instead of halves."""
    kernels = {"rope_append": rope_append("f32", interleaved=True)}
    decoder = Decoder(CONFIG, dtype="f32", kernels=kernels)
    return decoder.prepare(WEIGHTS, device, executor, **options)
