"""Two decoders over their caches, step by step, against the same models without a cache."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from command_lines import invoked

from onnx_models.tiny_decoder import VOCAB, TinyDecoder
from trt_nvfp4.builder.accuracy.decoding import compare_decoding, table
from trt_nvfp4.builder.cli.compare_engine import app
from trt_nvfp4.builder.errors import USAGE, VERIFICATION_FAILED, BuilderError

CAPACITY = 24


@pytest.fixture
def pair(tmp_path: Path, seed: int) -> tuple[TinyDecoder, TinyDecoder, Path, Path]:
    """A decoder, and the same with other weights in its head."""
    rng = np.random.default_rng(seed)
    first, second = (TinyDecoder(np.random.default_rng(seed), CAPACITY) for _ in range(2))
    second.weights["head"] = second.weights["head"] + 0.3 * rng.standard_normal(second.weights["head"].shape).astype(
        "f"
    )
    return first, second, first.save(tmp_path / "a.onnx"), second.save(tmp_path / "b.onnx")


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(np.float64(x) - np.float64(x).max())
    return e / e.sum()


def test_each_step_is_on_the_text_of_the_reference(
    pair: tuple[TinyDecoder, TinyDecoder, Path, Path], seed: int
) -> None:
    first, second, a, b = pair
    rng = np.random.default_rng(seed + 1)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in (7, 2, 4, 1, 5)]  # more than a batch of 4
    found = compare_decoding(a, b, 6, prompts)
    assert found.prompts == 5
    assert [step.step for step in found.steps] == list(range(6))
    for step in found.steps:
        kl, same = [], []
        for prompt in prompts:
            text = prompt + first.greedy(prompt, step.step) if step.step else prompt
            p, q = (softmax(np.asarray(model.logits(text))[-1]) for model in (first, second))
            kl.append(float((p * np.log(p / q)).sum()))
            same.append(p.argmax() == q.argmax())
        assert step.kl == pytest.approx(np.mean(kl), rel=1e-3, abs=1e-6)
        assert step.kl_worst == pytest.approx(max(kl), rel=1e-3, abs=1e-6)
        assert step.top1 == pytest.approx(np.mean(same))
    assert found.kl == pytest.approx(np.mean([step.kl for step in found.steps]))
    assert table(found).row_count


def test_a_decoder_is_equal_to_itself(pair: tuple[TinyDecoder, TinyDecoder, Path, Path]) -> None:
    found = compare_decoding(pair[2], pair[2], CAPACITY - 1)
    assert (found.kl, found.top1, len(found.steps)) == (0.0, 1.0, CAPACITY - 1)


def test_command(pair: tuple[TinyDecoder, TinyDecoder, Path, Path]) -> None:
    command = [str(pair[2]), str(pair[3]), "--steps", "4", "--samples", "2", "--json"]
    shown = invoked(app, command)
    assert len(json.loads(shown.stdout)["steps"]) == 4
    invoked(app, [*command, "--max-kl", "1e-9"], VERIFICATION_FAILED, "--max-kl 1e-09 is not met")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "30"], "30 steps are"),
        (["--steps", "2", "--min-cosine", "0.9"], "--min-cosine cannot apply"),
        (["--prompt", "a"], "add --steps N"),
        (["--steps", "2", "--prompt", "a"], "no tokenizer is there"),
    ],
)
def test_bad_input(arguments: list[str], words: str, pair: tuple[TinyDecoder, TinyDecoder, Path, Path]) -> None:
    shown = CliRunner().invoke(app, [str(pair[2]), str(pair[3]), *arguments])
    assert (shown.exit_code, words in " ".join(shown.stderr.split())) == (USAGE, True), shown.output


def test_models_of_other_tokens(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    small, large = TinyDecoder(rng).save(tmp_path / "a.onnx"), TinyDecoder(rng, vocab=80).save(tmp_path / "b.onnx")
    with pytest.raises(BuilderError, match="not the same model: 64 tokens"):
        compare_decoding(small, large, 2)
