"""Contents of messages reach every chat template, strings and lists of parts, as its author would call it."""

import json
from pathlib import Path
from typing import Any

import pytest

from trt_nvfp4.builder.errors import ModelFaultError
from trt_nvfp4.builder.generate.tokenizer import Tokenizer
from trt_nvfp4.calibration.samples import chats
from trt_nvfp4.common.errors import CalibrationError
from trt_nvfp4.common.tokenizers import TemplateError, load_tokenizer, render_chats

transformers = pytest.importorskip("transformers")

END = "{% if add_generation_prompt %}<|im_start|>assistant\\n{% endif %}"
START = "{% for m in messages %}<|im_start|>{{ m.role }}\\n"
# By the contents that they take: those of published models, shortened.
TEMPLATES = {
    "strings": START + "{{ m.content }}<|im_end|>\\n{% endfor %}" + END,
    "trimmed strings": START + "{{ m['content'] | trim }}<|im_end|>\\n{% endfor %}" + END,
    "both, Gemma 3": START + "{% if m.content is string %}{{ m.content | trim }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text | trim }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\\n{% endfor %}" + END,
    "parts, SmolVLM": START + "{% if m.content[0].type == 'image' %}:{% else %}: {% endif %}{% for line in m.content %}"
    "{% if line.type == 'text' %}{{ line.text }}{% elif line.type == 'image' %}<image>{% endif %}{% endfor %}"
    "<|im_end|>\\n{% endfor %}" + END,
    "parts, LLaVA": START + "{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}"
    "{% endfor %}<|im_end|>\\n{% endfor %}" + END,
    "first part": START + "{{ m.content[0]['text'] }}<|im_end|>\\n{% endfor %}" + END,
    "strings, else an error": START + "{% if m.content is not string %}{{ raise_exception('text only') }}{% endif %}"
    "{{ m.content }}<|im_end|>\\n{% endfor %}" + END,
    "parts, else an error": START + "{% if m.content is string %}{{ raise_exception('parts only') }}{% endif %}"
    "{% for part in m.content %}{{ part['text'] }}{% endfor %}<|im_end|>\\n{% endfor %}" + END,
}
TEXT = "the  quick user\n7 foxes"


def folder_of(folder: Path, template: str | None) -> Path:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<s>", "<|im_start|>", "<|im_end|>", "<image>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    backend.train_from_iterator([TEXT], trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def content(template: str, text: str) -> Any:
    """What its author gives."""
    return [{"type": "text", "text": text}] if "part" in template else text


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_are_those_of_the_authors_call(name: str, tmp_path: Path) -> None:
    folder_of(tmp_path, TEMPLATES[name])
    tokenizer = load_tokenizer(tmp_path)
    expected = tokenizer.apply_chat_template(
        [{"role": "user", "content": content(name, TEXT)}], add_generation_prompt=True, return_dict=False
    )
    assert Tokenizer(tmp_path).encode_chat(TEXT) == expected


@pytest.mark.parametrize("parts", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_calibration_data_of_either_form(name: str, parts: bool, tmp_path: Path) -> None:
    folder_of(tmp_path, TEMPLATES[name])
    tokenizer = load_tokenizer(tmp_path)
    roles = ("system", "user", "assistant")
    lines = [
        {"messages": [{"role": role, "content": content("part" * parts, f"{TEXT} {role}")} for role in roles]},
        {"messages": [{"role": "user", "content": content("part" * parts, "user")}]},
    ]
    file = tmp_path / "chats.jsonl"
    found = chats.texts(file, "\n".join(map(json.dumps, lines)), tokenizer)
    given = [
        [{"role": role, "content": content(name, text)} for role, text in chat]
        for chat in ([(role, f"{TEXT} {role}") for role in roles], [("user", "user")])
    ]
    assert [text for text, _ in found] == [tokenizer.apply_chat_template(chat, tokenize=False) for chat in given]


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}<|im_start|>{{ m.role }}{% endfor %}",
        "{% for m in messages %}{{ m.role }}: {{ m.text }}{% endfor %}",
        "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}",
        "{{ messages[-1].content }}",
    ],
)
def test_templates_that_drop_text_are_refused(template: str, tmp_path: Path) -> None:
    """Though "user" stands in what they write."""
    tokenizer = load_tokenizer(folder_of(tmp_path, template))
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "user"}]
    with pytest.raises(TemplateError, match="drops text of the messages"):
        render_chats(tokenizer, [chat])
    with pytest.raises(CalibrationError, match=r"chats.jsonl, line 1: .* drops text"):
        chats.texts(tmp_path / "chats.jsonl", json.dumps({"messages": chat}), tokenizer)
    if "m.content" not in template and "messages[" not in template:
        with pytest.raises(ModelFaultError, match="its chat template fails: it drops text"):
            Tokenizer(tmp_path).encode_chat("user")


@pytest.mark.parametrize("file", ["chat_template.json", "processor_config.json"])
def test_templates_that_only_processors_find(file: str, tmp_path: Path) -> None:
    folder_of(tmp_path, None)
    (tmp_path / file).write_text(json.dumps({"chat_template": TEMPLATES["strings"]}))
    assert Tokenizer(tmp_path).encode_chat(TEXT) == Tokenizer(
        folder_of(tmp_path / "beside", TEMPLATES["strings"])
    ).encode_chat(TEXT)
