"""All planted faults, as cases; and two at once."""

from __future__ import annotations

from collections.abc import Iterator

from localisation import (  # noqa: F401  (each declares its faults)
    faults_backward,
    faults_decode,
    faults_faint,
    faults_moe,
    faults_ports,
    faults_text,
    faults_two,
    faults_vision,
    held_out,
    structures,
    unseen_again_decoders,
    unseen_again_mixers,
    unseen_again_pairs,
    unseen_again_recurrent,
    unseen_again_sparse,
    unseen_again_vision,
    unseen_decoders,
    unseen_encoders,
    unseen_fifth_apart,
    unseen_fifth_codec,
    unseen_fifth_delta,
    unseen_fifth_gemma,
    unseen_fifth_prompted,
    unseen_fifth_queries,
    unseen_fifth_segments,
    unseen_fifth_speech,
    unseen_fifth_spoken,
    unseen_fifth_streams,
    unseen_fourth_generators,
    unseen_fourth_llamas,
    unseen_fourth_long,
    unseen_fourth_norms,
    unseen_fourth_pairs,
    unseen_fourth_routed,
    unseen_fourth_scaled,
    unseen_fourth_sinks,
    unseen_fourth_towers,
    unseen_latent,
    unseen_scans,
    unseen_sound,
    unseen_text,
    unseen_third_diffusion,
    unseen_third_encoders,
    unseen_third_experts,
    unseen_third_fused,
    unseen_third_one_key,
    unseen_third_parallel,
    unseen_third_vision,
    unseen_third_windows,
    unseen_vision,
)
from localisation.cases import Case
from localisation.planting import FAULTS


def cases() -> Iterator[Case]:
    """Yield every fault in every regime it is meant for."""
    for each in FAULTS:
        for regime in each.regimes:
            yield each.case(regime)
    yield from faults_two.cases()
