"""The decoder in Torch: on a CPU with the ops' references, on a GPU with the plugins, against ONNX Runtime."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from generated_ids import generated

from onnx_models.tiny_decoder import VOCAB
from trt_nvfp4.builder.errors import ModelFaultError, UnavailableError, UsageError
from trt_nvfp4.builder.generate import Generator
from trt_nvfp4.builder.generate.logits import HostLogits
from trt_nvfp4.builder.generate.loop import advance, prefill
from trt_nvfp4.builder.generate.onnx_runner import OnnxRunner
from trt_nvfp4.builder.generate.open import open_runner
from trt_nvfp4.builder.generate.torch_runner import TorchRunner
from trt_nvfp4.builder.pipeline import pipeline
from trt_nvfp4.builder.targets import find_target
from trt_nvfp4.graph_passes.planning.kinds.registry import ALL_KINDS

MODELS = Path(__file__).parents[2] / "trained_models"


def test_a_ragged_batch_generates_what_each_prompt_does_without_a_cache(tiny: Any, ragged: Any, tmp_path: Path) -> None:
    with Generator(tiny.save(tmp_path / "model.onnx"), runner="torch") as generator:
        expected = [tiny.greedy(prompt, 12) for prompt in ragged]
        for prompts in (ragged, ragged, ragged[1:]):  # empty caches every time; another batch
            found = generator.generate(prompts, max_new_tokens=12).generations
            assert [generation.token_ids for generation in found] == expected[-len(prompts) :]
        assert "torch" in generator.runs_on


def test_prompts_longer_than_a_step_are_taken_in_pieces(tiny: Any, ragged: Any, tmp_path: Path) -> None:
    runner = TorchRunner(tiny.save(tmp_path / "model.onnx"), "cpu")
    for runner.longest_step in (1, 2, 4, 5):
        assert generated(runner, ragged, 6) == [tiny.greedy(prompt, 6) for prompt in ragged]


def test_caches_are_updated_in_place_and_steps_of_one_shape_recompute_no_shape(tiny: Any, tmp_path: Path) -> None:
    runner = TorchRunner(tiny.save(tmp_path / "model.onnx"), "cpu")
    runner.start(2)
    ids = np.ones((2, 1), np.int64)
    caches = {name: cache.data_ptr() for name, cache in runner._caches.items()}
    runner.step(ids, np.zeros(2, np.int64), np.ones(2, np.int64))
    assert {name: cache.data_ptr() for name, cache in runner._caches.items()} == caches
    ops = [step.node.op for step in runner._recorded[2, 1].program._steps]
    assert not {"Shape", "Range", "Squeeze"} & set(ops)
    assert not runner._recorded[2, 1].program.waits


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_recorded_steps_give_their_own_logits_and_the_likeliest_of_them(
    device: str, tiny_of: Any, rng: np.random.Generator, tmp_path: Path
) -> None:
    """Steps of 1 to 16 tokens in any order, and pieces of prompts between them, of all rows or one, of which some are
    read and the next follows at once behind others; rows of unequal length; against ONNX Runtime."""
    tiny = tiny_of(capacity=2600, max_batch=3)
    model = tiny.save(tmp_path / "model.onnx")
    runner, reference = TorchRunner(model, device), OnnxRunner(model)
    runner._longest_recorded = 512  # of a GPU; on the CPU such steps are padded as if they were
    for _ in range(2):  # recorded in the second
        for each in (runner, reference):
            each.start(3)
        past = np.zeros(3, np.int64)
        for number in range(60):
            if number % 4 == 3:
                row, piece = int(rng.integers(3)), rng.integers(0, VOCAB, (1, int(rng.integers(1, 60))))
                given = row, piece, past[row : row + 1].copy(), np.array(piece.shape[1:])
                found, expected = (each.step_row(*given) for each in (runner, reference))
                np.testing.assert_allclose(found.host(), expected.host(), rtol=1e-3, atol=1e-3)
                past[row] += piece.shape[1]
                continue
            width = int(rng.integers(1, 17)) if number % 3 else 1 if number % 6 else int(rng.integers(17, 130))
            ids = rng.integers(0, VOCAB, (3, width))
            new = np.maximum(width - rng.integers(0, 3, 3), 1)
            count = int(rng.integers(1, min(width, 16) + 1))
            found, expected = (each.step(ids, past, new, count) for each in (runner, reference))
            past = past + rng.integers(1, 1 + new)
            if rng.random() < 0.5:
                continue
            host = found.host().copy()
            valid = np.arange(count) >= count - new[:, None]
            np.testing.assert_allclose(host[valid.ravel()], expected.host()[valid.ravel()], rtol=1e-3, atol=1e-3)
            numbers = rng.permutation(3 * count)[:2].tolist()
            for logits, values in ((found, host), (found.rows(numbers), host[numbers])):
                for most in (1, 5):
                    likeliest, same = logits.likeliest(most), HostLogits(values).likeliest(most)
                    assert (likeliest.ids == same.ids).all()
                    assert (likeliest.values == same.values).all()
                    assert likeliest.finite.all()
    if device == "cuda":
        assert all(step._graph is not None or step._runs == 1 for step in runner._recorded.values())
    assert max(tokens for _, tokens in runner._recorded) > 16


def test_runners_by_name(tiny: Any, tmp_path: Path) -> None:
    model = tiny.save(tmp_path / "m.rewritten.onnx")
    engine = tmp_path / "m.engine"
    engine.write_bytes(b"")
    for path in (model, engine):
        assert isinstance(open_runner(path, runner="torch"), TorchRunner)
        assert isinstance(open_runner(path, runner="onnxruntime"), OnnxRunner)
    with pytest.raises(UsageError, match="build it first"):
        open_runner(model, runner="tensorrt")
    model.unlink()
    with pytest.raises(ModelFaultError, match=r"m.rewritten.onnx is not there"):
        open_runner(engine, runner="torch")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(tiny: Any, tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="no NVIDIA GPU here; use --runner onnxruntime"):
        TorchRunner(tiny.save(tmp_path / "model.onnx"), "cuda")


CAPACITY = 320


@pytest.fixture(scope="module")
def rewritten(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Exports a trained model in a type and quantizes it, for this machine's GPU or an H200."""
    transformers = pytest.importorskip("transformers")
    made: dict[tuple[str, torch.dtype, tuple[str, ...] | None], Path] = {}

    def make(name: str, dtype: torch.dtype, kinds: tuple[str, ...] | None = None) -> Path:
        key = name, dtype, kinds
        if key not in made:
            folder = tmp_path_factory.mktemp(name)
            model = transformers.AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=dtype)
            model.config.max_position_embeddings = CAPACITY  # more than it was trained for
            model.save_pretrained(folder / "hf")
            transformers.AutoTokenizer.from_pretrained(MODELS / name).save_pretrained(folder / "hf")
            request = pipeline.Request(
                folder / "hf",
                find_target("h200"),
                output=folder / "m.engine",
                task="generate",
                stop_after="rewrite",
                cache_capacity=CAPACITY,
                max_batch=8,
                kinds=kinds,
            )
            pipeline.run(request)
            made[key] = folder / "m.rewritten.onnx"
        return made[key]

    return make


def held_out(count: int) -> list[list[int]]:
    """Prompts of different lengths from text that the trained models have not seen."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODELS / "llama")
    ids = tokenizer((MODELS / "text" / "held_out.txt").read_text()[:60_000])["input_ids"]
    return [ids[500 * number : 500 * number + 12 + number % 5] for number in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_a_quantized_model_generates_what_it_does_in_onnx_runtime(name: str, rewritten: Any) -> None:
    model = rewritten(name, torch.float16)
    prompts = held_out(2)
    assert generated(TorchRunner(model, "cpu"), prompts, 8) == generated(OnnxRunner(model), prompts, 8)


#: Smaller differences between the two likeliest tokens' logits may turn with roundings to the type.
NEAR_TIE = {torch.float16: 0.03, torch.bfloat16: 0.1}
STEPS, BATCH = 64, 8


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_the_plugins_generate_the_tokens_of_onnx_runtime(name: str, dtype: torch.dtype, rewritten: Any) -> None:
    """64 steps, as CUDA graphs: the same text wherever ONNX Runtime's own choice was no near tie; and, on ONNX
    Runtime's text, the same token at every step that was none."""
    model = rewritten(name, dtype)
    reference, runner = OnnxRunner(model), TorchRunner(model, "cuda")
    prompts, clear, near, errors = held_out(4 * BATCH), 0, 0, []
    for start in range(0, len(prompts), BATCH):
        batch = prompts[start : start + BATCH]
        rows = [list(prompt) for prompt in batch]
        for each in (reference, runner):
            each.start(BATCH)
        expected, found = prefill(reference, rows).host(), prefill(runner, rows).host()
        smallest = np.full(BATCH, np.inf)
        for step in range(STEPS):
            second, first = np.sort(expected, -1)[:, -2:].T
            tie = first - second < NEAR_TIE[dtype]
            assert ((expected.argmax(-1) == found.argmax(-1)) | tie).all()
            near += int(tie.sum())
            smallest = np.minimum(smallest, first - second)
            errors.append(float(np.abs(expected - found).max()))
            for row, token in zip(rows, expected.argmax(-1), strict=True):
                row.append(int(token))
            if step < STEPS - 1:
                running = list(range(BATCH))
                expected, found = (advance(each, rows, running).host() for each in (reference, runner))
        assert runner._recorded[2, 1]._graph is not None
        free = generated(runner, batch, STEPS)
        for text, row, prompt, margin in zip(free, rows, batch, smallest, strict=True):
            if margin >= NEAR_TIE[dtype]:
                assert text == row[len(prompt) :]
                clear += 1
    assert clear
    steps = len(prompts) * STEPS
    print(f"{name} {dtype}: {clear} texts equal, {steps - near} of {steps} steps no near tie, error {max(errors):.3f}")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_one_launch_generates_the_tokens_of_its_parts(name: str, dtype: torch.dtype, rewritten: Any) -> None:
    """256 steps on the text of the parts: the same token at every step, but for near ties."""
    parts, one = (TorchRunner(rewritten(name, dtype, kinds), "cuda") for kinds in (None, (*ALL_KINDS, "decoder")))
    near = equal = 0
    for prompt in held_out(3):
        rows = [list(prompt)]
        for runner in (parts, one):
            runner.start(1)
        expected, found = (prefill(runner, rows).host() for runner in (parts, one))
        for _ in range(256):
            second, first = np.sort(expected, -1)[:, -2:].T
            tie = first - second < NEAR_TIE[dtype]
            same = expected.argmax(-1) == found.argmax(-1)
            assert (same | tie).all()
            near += int(tie.sum())
            equal += int(same.sum())
            rows[0].append(int(expected.argmax(-1)[0]))
            expected, found = (advance(runner, rows, [0]).host() for runner in (parts, one))
    print(f"{name} {dtype}: {equal} of {3 * 256} tokens equal, {near} near ties")
