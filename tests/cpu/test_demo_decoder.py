"""The demo's decoder: every way is profiled, and a difference from the first one is said."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from brickline import TileLevel
from brickline.commands.demo import PROMPT
from brickline.commands.demo_decoder import PROFILED_TOKENS, Decoded, DemoDecoder
from brickline.decoder import Decoder
from brickline.decoder_weights import DecoderConfig, random_weights

SMALL = DecoderConfig(
    vocabulary=2304, dim=64, hidden=96, layers=2, heads=4, kv_heads=2, head_dim=16, capacity=128
)


@pytest.fixture(scope="module")
def ways() -> dict[str, Decoded]:
    demo = DemoDecoder(Decoder(SMALL, dtype="f32"), random_weights(SMALL, dtype="f32", seed=3))
    return {
        executor: demo.decode("CPU", executor, PROMPT)
        for executor in ("serial", "parallel", "megakernel")
    }


@pytest.mark.parametrize("executor", ["serial", "parallel", "megakernel"])
def test_every_way_is_profiled_and_has_the_bits_of_the_first(
    ways: dict[str, Decoded], executor: str
) -> None:
    way = ways[executor]
    assert way.against(ways["serial"]) == "the same bits"
    assert way.logits.shape == (PROFILED_TOKENS, SMALL.vocabulary)
    assert len(np.unique(way.logits, axis=0)) > 1
    assert way.profile.decode.count == PROFILED_TOKENS
    assert 0 < way.step_ns < 60e9
    assert way.tokens_per_second > 0
    brick, share = way.busiest
    assert brick in {launch.brick for launch in Decoder(SMALL).plan.launches}
    assert 0 < share < 1


def test_what_a_megakernel_did_is_in_its_report_and_in_its_profile(
    ways: dict[str, Decoded],
) -> None:
    assert ways["serial"].report is None
    way = ways["megakernel"]
    assert way.report is not None
    assert way.report.is_complete
    (tiles,) = way.profile.tiles
    assert tiles.level == TileLevel.MACRO
    assert tiles.count == PROFILED_TOKENS * len(way.report.spans)
    work = dict.fromkeys(way.report.bricks, 0)
    for task, spent in zip(way.report.spans.task, way.report.spans.work_ns, strict=True):
        work[way.report.bricks[way.report.tasks.brick[task]]] += int(spent)
    brick, share = way.busiest
    assert work[brick] == max(work.values())
    assert share == pytest.approx(work[brick] / sum(work.values()))


def test_a_difference_is_said(ways: dict[str, Decoded]) -> None:
    reference = ways["serial"]
    logits = reference.logits.copy()
    logits[3, 5] = np.nextafter(logits[3, 5], np.float32(np.inf))
    one_off = replace(reference, logits=logits)
    assert one_off.against(reference) == f"1 of {logits.size} logits differ"
    tokens = list(reference.tokens)
    tokens[1] += 1
    other = replace(reference, tokens=tuple(tokens))
    assert other.against(reference) == "other tokens from the 2. on"
