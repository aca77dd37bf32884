"""Chats with images in a server's slots: every text is that of the pipeline, whatever runs beside it."""

import base64
import io
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("PIL")

import PIL.Image

from trt_nvfp4.builder.components.directory import of_directory
from trt_nvfp4.builder.components.images import Preprocessing
from trt_nvfp4.builder.components.manifest import FILE
from trt_nvfp4.builder.components.picture_slots import PictureSlots
from trt_nvfp4.builder.components.pipeline import Pipeline
from trt_nvfp4.builder.errors import UsageError
from trt_nvfp4.builder.export.tokenizer_files import copy_tokenizer
from trt_nvfp4.builder.model.decoder_contract import TOKENIZER, CacheOptions
from trt_nvfp4.builder.serve import prompts
from trt_nvfp4.builder.serve.fair_queue import FairQueue
from trt_nvfp4.builder.serve.request import Event, Generated, Request, Started
from trt_nvfp4.builder.serve.scheduler import Scheduler, Told

from .families import saved
from .test_families import exported, size_of
from .test_images import save_processor

pytestmark = pytest.mark.slow
PREPROCESSING = Preprocessing(32, 48, "bicubic", 1 / 255, [0.5] * 3, [0.5] * 3)


def parts_of(name: str, folder: Path, seed: int) -> Path:
    saved(name, folder / name, seed)
    source = of_directory(folder / name, CacheOptions(80, 3), size_of(name))
    exported(source, folder / "parts")
    file = folder / "parts" / FILE
    manifest = json.loads(file.read_text())
    manifest["settings"]["preprocessing"] = PREPROCESSING.json()  # the tiny model has no processor of its own
    file.write_text(json.dumps(manifest))
    return folder / "parts"


def pixels_for(slots: PictureSlots, rng: np.random.Generator) -> np.ndarray:
    (port,) = slots._vision.inputs.values()
    shape = [dim if isinstance(dim, int) else 1 for dim in port.shape]
    found: np.ndarray = rng.standard_normal(shape if slots._alone else shape[1:]).astype(np.float32)
    return found


def into(events: dict[Request, list[Event]]) -> Callable[[list[Told]], None]:
    def deliver(told: list[Told]) -> None:
        for request, event in told:
            events[request].append(event)

    return deliver


def ids(events: list[Event]) -> list[int]:
    return [event.id for event in events if isinstance(event, Generated)]


@pytest.mark.parametrize("name", ["qwen2_5_vl", "llava", "qwen3_vl"])
@pytest.mark.parametrize("most", [None, 1])
def test_texts_are_those_of_the_pipeline(
    name: str, most: int | None, tmp_path: Path, seed: int, rng: np.random.Generator
) -> None:
    """Texts with no image, one and two, which join a running batch; then a second turn of one. `most`: images that the
    embedding takes at a time."""
    folder = parts_of(name, tmp_path, seed)
    slots, queue = PictureSlots(folder), FairQueue(10)
    if most is not None:
        slots._most = most * slots._tokens
    events: dict[Request, list[Event]] = defaultdict(list)
    scheduler = Scheduler(slots, 3, queue, into(events))
    seen = [pixels_for(slots, rng) for _ in range(2)]
    token = slots.image_token
    texts: list[tuple[list[int], list[np.ndarray]]] = [
        ([5, token, 7, 8], seen[:1]),
        ([5, 6, 9], []),
        ([5, token, 7, token, 3, 4], seen),
        ([5, token, 7, 9, 11], seen[:1]),
    ]
    asked = []
    for number, (text, images) in enumerate(texts):
        pictures = [slots.see(each) for each in images]
        prompt = slots.placed(text, pictures) if images else text
        # A generated mark of an image has no feature.
        asked.append(Request(prompt, 8, stop=frozenset([token]), pictures=pictures))
        scheduler.check(asked[-1])
        queue.put(asked[-1])
        while number == 2 and scheduler.step():
            pass
        scheduler.step()
    del pictures
    while scheduler.step():
        pass
    started = events[asked[3]][0]
    assert isinstance(started, Started)
    assert started.reused >= slots._tokens + 2
    with Pipeline(folder) as pipeline:
        for (text, images), request in zip(texts, asked, strict=True):
            given = {} if not images else {"images": np.stack(images)}
            expected = pipeline.generate([text], **given, max_new_tokens=8, stop=[token]).generations[0]
            assert ids(events[request]) == expected.token_ids


def test_a_spelt_mark_takes_no_feature_of_others(tmp_path: Path, seed: int, rng: np.random.Generator) -> None:
    folder = parts_of("llava", tmp_path, seed)
    slots, queue = PictureSlots(folder), FairQueue(10)
    events: dict[Request, list[Event]] = defaultdict(list)
    scheduler = Scheduler(slots, 2, queue, into(events))
    picture = slots.see(pixels_for(slots, rng))
    found = []
    for beside in (False, True):
        if beside:
            queue.put(Request([3, slots.image_token, 4], 4))
        request = Request(slots.placed([5, slots.image_token], [picture]), 4, pictures=[picture])
        queue.put(request)
        while scheduler.step():
            pass
        found.append(ids(events[request]))
    assert found[0] == found[1]
    # Texts that begin alike continue a row: it forgets the images of those before.
    for _ in range(4):
        picture = slots.see(pixels_for(slots, rng))
        queue.put(Request(slots.placed([5, slots.image_token], [picture]), 4, pictures=[picture]))
        while scheduler.step():
            pass
    assert max(map(len, slots._held)) == 1


def test_models_that_are_not_served_say_why(tmp_path: Path, seed: int) -> None:
    with pytest.raises(UsageError, match="see tokens that follow"):
        PictureSlots(parts_of("paligemma", tmp_path, seed))


def url_of(image: PIL.Image.Image, kind: str = "PNG") -> str:
    file = io.BytesIO()
    image.save(file, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def test_images_of_data_urls(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    monkeypatch.setattr(prompts, "_preprocessing", PREPROCESSING)
    image = PIL.Image.fromarray(rng.integers(0, 256, (40, 30, 3), dtype=np.uint8))
    found: Any = prompts._seen(url_of(image))
    assert np.array_equal(found, PREPROCESSING(image))
    large = url_of(PIL.Image.new("1", (20_000, 20_000)))
    for wrong in ("data:image/png;base64,AAAA", "data:image/png;base64,%", large):
        assert "an image cannot be read" in str(prompts._seen(wrong))


# A random model may generate the mark of an image (TRT_NVFP4_TEST_SEED=1315443282). The pipeline puts a feature there,
# the server zeros, and transformers the mark's own embedding.
@pytest.mark.nightly
def test_a_chat_with_an_image_over_http(tmp_path: Path, seed: int, rng: np.random.Generator) -> None:
    """By OpenAI's client; the text is the pipeline's, of the same file."""
    openai = pytest.importorskip("openai")
    saved("llava", tmp_path / "m", seed)
    save_processor("llava", tmp_path / "m")
    exported(of_directory(tmp_path / "m", CacheOptions(80, 2), None), tmp_path / "parts")
    copy_tokenizer(tmp_path / "m", tmp_path / "parts" / TOKENIZER)
    image = PIL.Image.fromarray(rng.integers(0, 256, (45, 70, 3), dtype=np.uint8))
    image.save(tmp_path / "image.png")
    command = [sys.executable, "-m", "trt_nvfp4.builder.cli.umbrella", "serve", str(tmp_path / "parts"), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            ready = next(line for line in map(json.loads, process.stderr) if line["event"] == "ready")
            client = openai.OpenAI(base_url=f"{ready['address']}/v1", api_key="any", max_retries=0, timeout=60)

            def asked(url: str) -> Any:
                content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is this"}]
                messages = [{"role": "user", "content": content}]
                return client.chat.completions.create(model="parts", messages=messages, max_tokens=8, temperature=0)

            answers = [asked(url_of(image)) for _ in range(2)]
            with pytest.raises(openai.BadRequestError, match="an image cannot be read"):
                asked("data:image/png;base64,AAAA")
            with pytest.raises(openai.BadRequestError, match="url"):
                asked("http://127.0.0.1/image.png")
        finally:
            process.kill()
    assert answers[1].usage.prompt_tokens_details.cached_tokens == answers[0].usage.prompt_tokens - 1
    with Pipeline(tmp_path / "parts") as pipeline:
        expected = pipeline.generate("what is this", images=[tmp_path / "image.png"], max_new_tokens=8).generations[0]
    assert answers[0].usage.prompt_tokens == len(expected.prompt_ids)
    assert [answer.choices[0].message.content for answer in answers] == [expected.text] * 2
