"""Decode tokens through a small transformer made of NumPy, with every brick timed.

Usage: python decode.py [RUN]    (default decode.brick; a run that lies there is replaced)
"""

import sys

import numpy as np

import brickline as bl
from brickline import BrickId

LAYERS, DIM, HIDDEN, VOCAB, TOKENS = 4, 512, 1536, 8192, 64
rng = np.random.default_rng(seed=0)


def weights(rows, columns):
    """Return a random matrix that keeps the size of what is multiplied by it."""
    return rng.standard_normal((rows, columns), dtype=np.float32) / np.float32(rows**0.5)


embedding, head = weights(VOCAB, DIM), weights(DIM, VOCAB)
qkv = [weights(DIM, 3 * DIM) for _ in range(LAYERS)]
up, down = [weights(DIM, HIDDEN) for _ in qkv], [weights(HIDDEN, DIM) for _ in qkv]
keys, values = [[] for _ in qkv], [[] for _ in qkv]


def decode(profiler, token):
    """Return the token that follows; one pass of the model."""
    with profiler.brick(BrickId.EMBEDDING):
        x = embedding[token]
    for layer in range(LAYERS):
        with profiler.brick(BrickId.RMS_NORM, layer):
            h = x / np.sqrt(np.mean(x * x) + 1e-6)
        with profiler.brick(BrickId.QKV_PROJECTION, layer, bytes=qkv[layer].nbytes):
            q, k, v = np.split(h @ qkv[layer], 3)
        with profiler.brick("Attention", layer):  # a name of your own, around two known bricks
            with profiler.brick(BrickId.KV_CACHE_APPEND, layer):
                keys[layer].append(k)
                values[layer].append(v)
            with profiler.brick(BrickId.ATTENTION_SCORE, layer):
                scores = np.exp(np.array(keys[layer]) @ q / np.float32(DIM**0.5))
                x = x + scores @ np.array(values[layer]) / scores.sum()
        with profiler.brick(BrickId.UP_PROJECTION, layer, bytes=up[layer].nbytes):
            h = np.tanh(x @ up[layer])
        with profiler.brick(BrickId.DOWN_PROJECTION, layer, bytes=down[layer].nbytes):
            x = x + h @ down[layer]
    with profiler.brick(BrickId.LM_HEAD, bytes=head.nbytes):
        return int(np.argmax(x @ head))


path = sys.argv[1] if len(sys.argv) > 1 else "decode.brick"
with bl.BrickProfiler("decode", enabled=True, path=path, overwrite=True) as profiler:
    token = 1
    for _ in range(TOKENS):
        with profiler.step(tokens=1, phase="decode"):
            token = decode(profiler, token)
    print(profiler.summary())
