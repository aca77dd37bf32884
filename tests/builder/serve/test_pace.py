"""Pieces of prompts between the steps of texts, by made-up times."""

import numpy as np

from trt_nvfp4.builder.serve.pace import Pace


def test_a_text_waits_three_steps_for_a_token_at_most(rng: np.random.Generator) -> None:
    for _ in range(50):
        step = rng.uniform(0.5, 5.0)
        fixed, each = rng.uniform(0.0, 0.9) * step, rng.uniform(0.001, 0.1) * step
        pace, between, left, pieces = Pace(512), [0.0], 4096, 0
        for width in pace.widths:
            pace.learn_piece(width, fixed + width * each)
        pace.learn_step(step, 1, 1)
        while left > 0:
            if width := pace.width():
                pace.learn_piece(width, fixed + width * each)
                left, pieces, between[-1] = left - width, pieces + 1, between[-1] + fixed + width * each
            else:
                pace.learn_step(step, 1, 1)
                between.append(0.0)
        # Now and then a wider piece is tried again.
        assert np.quantile(between, 0.9) <= 2 * step * 1.1
        widest = max([width for width in pace.widths if fixed + width * each <= 2 * step])
        assert pieces <= 3 * 4096 / widest  # narrower ones follow where there is time left
