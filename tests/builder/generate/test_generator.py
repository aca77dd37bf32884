"""Generation over a cache against the same model without one, and what bad input says."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from generated_ids import generated

from trt_nvfp4.builder.errors import BuilderError, ModelFaultError, UsageError
from trt_nvfp4.builder.generate import Generator
from trt_nvfp4.builder.generate.onnx_runner import OnnxRunner

TOKENIZER = Path(__file__).parents[2] / "trained_models" / "llama"


def test_a_ragged_batch_generates_what_each_prompt_does_without_a_cache(tiny: Any, ragged: Any, tmp_path: Path) -> None:
    with Generator(tiny.save(tmp_path / "model.onnx")) as generator:
        result = generator.generate(ragged, max_new_tokens=12)
        again = generator.generate(ragged[1], max_new_tokens=12)
    assert [found.token_ids for found in result.generations] == [tiny.greedy(prompt, 12) for prompt in ragged]
    assert [found.finish for found in result.generations] == ["length"] * 3
    assert again.generations[0].token_ids == result.generations[1].token_ids  # empty caches every time
    assert result.timings.tokens == 36
    assert result.timings.first_token_s > 0


def test_prompts_longer_than_a_step_are_taken_in_pieces(tiny: Any, ragged: Any, tmp_path: Path) -> None:
    runner = OnnxRunner(tiny.save(tmp_path / "model.onnx"))
    for runner.longest_step in (1, 2, 4, 5):
        tokens = generated(runner, ragged, 6)
        assert tokens == [tiny.greedy(prompt, 6) for prompt in ragged]


def test_stop_tokens_end_their_own_sequence_alone(tiny: Any, ragged: Any, tmp_path: Path) -> None:
    plain = [tiny.greedy(prompt, 10) for prompt in ragged]
    stop = plain[0][3]
    with Generator(tiny.save(tmp_path / "model.onnx", eos_token_ids=[stop])) as generator:
        found = generator.generate(ragged, max_new_tokens=10).generations
    for generation, tokens in zip(found, plain, strict=True):
        expected = tokens[: tokens.index(stop) + 1] if stop in tokens else tokens
        assert generation.token_ids == expected
        assert generation.finish == ("stop" if stop in tokens else "length")


def test_a_full_cache_ends_its_sequence_and_says_so(tiny_of: Any, ragged: Any, tmp_path: Path) -> None:
    tiny = tiny_of(capacity=12)
    with Generator(tiny.save(tmp_path / "model.onnx")) as generator:
        found = generator.generate(ragged, max_new_tokens=8).generations
        full = generator.generate([[1] * 12], max_new_tokens=8).generations[0]
    # 9 tokens of the prompt and 3 of its continuation fill the cache; the last token needs no place.
    assert (found[0].token_ids, found[0].finish) == (tiny.greedy(ragged[0], 4), "capacity")
    assert [(g.token_ids, g.finish) for g in found[1:]] == [(tiny.greedy(p, 8), "length") for p in ragged[1:]]
    assert (len(full.token_ids), full.finish) == (1, "capacity")


def test_a_model_whose_frequencies_change_runs_again_from_its_first_token(
    tiny: Any, ragged: Any, tmp_path: Path
) -> None:
    runner = OnnxRunner(tiny.save(tmp_path / "model.onnx", recompute_length=10))
    steps: list[tuple[list[int], list[int]]] = []
    step = runner.step

    def noted(ids: np.ndarray, past: np.ndarray, new: np.ndarray, count: int = 1) -> Any:
        steps.append((past.tolist(), new.tolist()))
        return step(ids, past, new, count)

    runner.step = noted  # type: ignore[method-assign]
    assert generated(runner, ragged, 7) == [tiny.greedy(prompt, 7) for prompt in ragged]
    # The first prompt, of 9 tokens, grows beyond 10 with its second token.
    assert [past for past, new in steps] == [[0] * 3, [9, 1, 4], [0] * 3, *([11 + n, 3 + n, 6 + n] for n in range(4))]
    assert steps[2][1] == [11, 3, 6]


def test_sampling_follows_the_distribution_and_the_seed(tiny: Any, tmp_path: Path) -> None:
    prompt = [3, 1, 4]
    with Generator(tiny.save(tmp_path / "model.onnx")) as generator:

        def draw(seed: int, **options: Any) -> int:
            found = generator.generate([prompt], max_new_tokens=1, temperature=1.7, seed=seed, **options)
            return found.generations[0].token_ids[0]

        logits = tiny.logits(prompt)[-1].astype(float) / 1.7
        p = np.exp(logits - logits.max())
        p /= p.sum()
        order = np.argsort(-p)
        drawn = np.bincount([draw(seed) for seed in range(400)], minlength=len(p))
        # Expected squared distance of 400 draws is (1 - sum p^2) / 400.
        assert ((drawn / 400 - p) ** 2).sum() < 4 / 400
        assert {draw(seed, top_k=2) for seed in range(40)} <= set(order[:2].tolist())
        nucleus = order[: int(np.searchsorted(np.cumsum(p[order]), 0.4)) + 1]
        assert {draw(seed, top_p=0.4) for seed in range(40)} <= set(nucleus.tolist())
        assert draw(7) == draw(7)


def test_streamed_pieces_join_to_the_text(tiny: Any, tmp_path: Path) -> None:
    path = tiny.save(tmp_path / "model.onnx")
    with Generator(path, TOKENIZER) as generator:
        prompt = _prompt_of_known_tokens(generator)
        pieces = list(generator.stream(prompt, max_new_tokens=15))
        result = generator.generate(prompt, max_new_tokens=15)
    assert [piece.token_id for piece in pieces] == result.generations[0].token_ids
    assert "".join(piece.text for piece in pieces) == result.generations[0].text
    assert pieces[-1].finish == "length"


def test_text_ends_before_stop_strings_and_tokens(tiny: Any, tmp_path: Path) -> None:
    """Wherever they lie in tokens; streamed pieces hold nothing of them."""
    with Generator(tiny.save(tmp_path / "model.onnx"), TOKENIZER) as generator:
        prompt = _prompt_of_known_tokens(generator)
        whole = generator.generate(prompt, max_new_tokens=15).generations[0]
        for start in range(2, len(whole.text) - 4, 3):
            word = whole.text[start : start + 4]
            found = generator.generate(prompt, max_new_tokens=15, stop=[word, "never"]).generations[0]
            streamed = "".join(piece.text for piece in generator.stream(prompt, max_new_tokens=15, stop=[word]))
            assert found.text == streamed == whole.text[: whole.text.find(word)]
            assert found.finish == "stop"
            assert found.token_ids == whole.token_ids[: len(found.token_ids)]
        stop = whole.token_ids[6]
        found = generator.generate(prompt, max_new_tokens=15, stop=[stop]).generations[0]
        streamed = "".join(piece.text for piece in generator.stream(prompt, max_new_tokens=15, stop=[stop]))
        kept = whole.token_ids[: whole.token_ids.index(stop)]
        assert found.token_ids == [*kept, stop]
        assert found.text == streamed == (generator._tokenizer.decode(kept) if generator._tokenizer else None)


@pytest.mark.parametrize(("repetition", "presence"), [(1.8, 0.0), (0.6, 0.0), (1.0, 2.5), (1.3, -0.7)])
def test_penalties(repetition: float, presence: float, tiny: Any, ragged: Any, tmp_path: Path) -> None:
    """As transformers and OpenAI define them."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    processor = transformers.RepetitionPenaltyLogitsProcessor(repetition)

    def greedy(prompt: list[int]) -> list[int]:
        text = list(prompt)
        for _ in range(8):
            logits = processor(torch.tensor([text]), torch.tensor(tiny.logits(text)[-1:]).double())[0].numpy()
            logits[sorted(set(text[len(prompt) :]))] -= presence
            text.append(int(logits.argmax()))
        return text[len(prompt) :]

    with Generator(tiny.save(tmp_path / "model.onnx")) as generator:
        found = generator.generate(
            ragged, max_new_tokens=8, repetition_penalty=repetition, presence_penalty=presence
        ).generations
    assert [generation.token_ids for generation in found] == [greedy(prompt) for prompt in ragged]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"repetition_penalty": 0.0}, "--repetition-penalty 0"),
        ({"presence_penalty": float("nan")}, "--presence-penalty nan"),
        ({"stop": [""]}, "a stop string is empty"),
        ({"temperature": -1.0}, "--temperature"),
        ({"temperature": float("nan")}, "--temperature"),
        ({"temperature": 1.0, "top_k": 0}, "--top-k 0"),
        ({"temperature": 1.0, "top_p": 1.5}, "--top-p 1.5"),
        ({"top_k": 5}, "greedy decoding ignores it"),
        ({"max_new_tokens": 0}, "--max-new-tokens 0"),
        ({"chat": True}, "takes text"),
    ],
)
def test_options_out_of_range_are_refused(tiny: Any, tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with Generator(tiny.save(tmp_path / "model.onnx")) as generator, pytest.raises(UsageError, match=words):
        generator.generate([[1]], **options)


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([], "no prompt"),
        ([[]], "prompt 1 is empty"),
        ([[1]] * 5, "takes at most 4 at once"),
        ([[1], [1] * 25], "prompt 2 has 25 tokens, but the caches hold 24"),
        ([[64]], "token 64, but the model knows 64"),
        ([[-1]], "token -1"),
    ],
)
def test_prompts_that_do_not_fit_are_refused(tiny: Any, tmp_path: Path, prompts: Any, words: str) -> None:
    with Generator(tiny.save(tmp_path / "model.onnx")) as generator, pytest.raises(UsageError, match=words):
        generator.generate(prompts)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"cache_dtype": "float16"}, "past_key_values.0.key is float, but the metadata says float16"),
        ({"cache_dtype": "float8e4m3fn"}, "caches are float8e4m3fn"),
        ({"capacity": 30}, r"shape \[batch, 2, 24, 8\], but the metadata says \[batch, 2, 30, 8\]"),
        ({"kv_heads": [2] * 2, "head_dim": [8] * 2, "value_head_dim": [8] * 2}, "no input past_key_values.1.key"),
    ],
)
def test_caches_of_another_type_or_shape_are_refused(tiny: Any, tmp_path: Path, changed: Any, words: str) -> None:
    path = tiny.save(tmp_path / "model.onnx", **changed)
    with pytest.raises(ModelFaultError, match=words):
        Generator(path)


def test_a_model_without_caches_and_other_files_are_refused(gated_mlps: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("")
    for path, words in (
        (gated_mlps, "a model without caches"),
        (tmp_path / "none.engine", "no such file"),
        (tmp_path / "text.txt", "expected an engine"),
        (tmp_path, "not a bundle"),
    ):
        with pytest.raises(BuilderError, match=words):
            Generator(path)


def test_a_hugging_face_directory_generates_what_transformers_does() -> None:
    """Exported to a scratch folder, which is gone afterwards."""
    transformers = pytest.importorskip("transformers")
    texts = ["Once upon a time there was a", "The"]
    reference = transformers.AutoModelForCausalLM.from_pretrained(TOKENIZER)
    tokenizer = transformers.AutoTokenizer.from_pretrained(TOKENIZER)
    before = set(Path(tempfile.gettempdir()).iterdir())
    with Generator(TOKENIZER) as generator:
        found = generator.generate(texts, max_new_tokens=6).generations
        made = set(Path(tempfile.gettempdir()).iterdir()) - before
        assert any((folder / "model.onnx").is_file() for folder in made if folder.is_dir())
    assert not any(folder.exists() for folder in made if (folder / "model.onnx").is_file())
    for text, generation in zip(texts, found, strict=True):
        ids = tokenizer(text, return_tensors="pt").input_ids
        expected = reference.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        assert generation.token_ids == expected.tolist()
        assert generation.text == tokenizer.decode(expected, skip_special_tokens=True)


def test_text_without_tokenizer_or_chat_template_is_refused(tiny: Any, tmp_path: Path) -> None:
    path = tiny.save(tmp_path / "model.onnx")
    with Generator(path) as generator, pytest.raises(BuilderError, match="no tokenizer is there"):
        generator.generate("a")
    shutil.copytree(TOKENIZER, tmp_path / "tokenizer", ignore=shutil.ignore_patterns("*.safetensors"))
    with Generator(path) as generator, pytest.raises(BuilderError, match="no chat template; give texts in place"):
        generator.generate("a", chat=True)
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with Generator(path) as generator, pytest.raises(BuilderError, match="roles must alternate"):
        generator.generate("a", chat=True)
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{")
    with Generator(path) as generator, pytest.raises(BuilderError, match="cannot load its tokenizer"):
        generator.generate("a")


def test_logits_that_are_not_finite_end_generation(tiny: Any, tmp_path: Path) -> None:
    tiny.weights["head"][0, 0] = np.nan
    with Generator(tiny.save(tmp_path / "model.onnx")) as generator, pytest.raises(BuilderError, match="NaN"):
        generator.generate([[1]])


def test_all_logits_are_read_at_the_last_valid_token(tiny: Any, ragged: Any, tmp_path: Path) -> None:
    path = tiny.save(tmp_path / "model.onnx", all_logits=True)
    model = onnx.load(path)
    head = next(node for node in model.graph.node if node.output[0] == "logits")
    head.input[0] = "y"
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_param = "new"
    onnx.save(model, path)
    assert generated(OnnxRunner(path), ragged, 5) == [tiny.greedy(prompt, 5) for prompt in ragged]


def _prompt_of_known_tokens(generator: Generator) -> str:
    """Text whose tokens the tiny model has."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(TOKENIZER)
    tokens: Callable[[str], list[int]] = lambda text: tokenizer(text)["input_ids"]  # noqa: E731
    return next(c for c in "abcdefghijklmnopqrstuvwxyz.,!?" if max(tokens(c)) < generator.decoder.vocab_size)
