"""Random changes to ONNX models, at the level of protobuf: fields of any message at any depth."""

import random
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

INTEGERS = (-(2**63), -(2**31), -2, -1, 0, 1, 2, 3, 7, 16, 23, 255, 2**31 - 1, 2**31, 2**62, 2**63 - 1)
FLOATS = (0.0, -1.0, 1e-45, 1e38, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "",
    "x",
    "y",
    "\x1b]0;title\x07",
    "../secret",
    "/dev/zero",
    "%s{}[red]",
    "Ω\u202e",
    "a" * 300,
    "{'a': 1",
    "[" * 500,
)
# Longest list that is changed by an element; weights in typed fields are changed as a whole.
_LONG = 512

_INTEGER_TYPES = (
    *(FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64),
    *(FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64),
)


def messages(message: Message) -> Iterator[Message]:
    """The message and all that it holds, at any depth."""
    yield message
    for field, value in message.ListFields():
        if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            for inner in value if field.is_repeated else [value]:
                yield from messages(inner)


def mutate(model: Message, random_: random.Random) -> None:
    """Change the model in one to three places."""
    for _ in range(random_.choice((1, 1, 1, 2, 3))):
        for _ in range(20):
            message = random_.choice(list(messages(model)))
            if message.DESCRIPTOR.fields and _change(message, random_):
                break


def _change(message: Message, random_: random.Random) -> bool:
    """Change a field of the message; False where nothing came of it. Fields that are set are changed more often."""
    present = [field for field, _ in message.ListFields()]
    field = random_.choice(present if present and random_.random() < 0.8 else message.DESCRIPTOR.fields)
    before = message.SerializeToString()
    try:
        if field.is_repeated:
            _change_list(getattr(message, field.name), field, random_)
        elif random_.random() < 0.25:
            message.ClearField(field.name)
        elif field.cpp_type != FieldDescriptor.CPPTYPE_MESSAGE:
            setattr(message, field.name, _value(getattr(message, field.name), field, random_))
        else:
            getattr(message, field.name).SetInParent()
    except (ValueError, TypeError):  # out of the field's range
        return False
    return message.SerializeToString() != before


def _change_list(values: Any, field: FieldDescriptor, random_: random.Random) -> None:
    kind = random_.choice(("remove", "repeat", "swap", "change", "clear", "add"))
    if kind == "clear" or len(values) > _LONG:
        del values[: random_.choice((len(values), 1))]
    elif kind == "remove" and values:
        del values[random_.randrange(len(values))]
    elif kind == "repeat" and values:
        values.extend([values[random_.randrange(len(values))]])
    elif kind == "swap" and len(values) > 1:
        kept = list(values)
        first, second = random_.sample(range(len(kept)), 2)
        kept[first], kept[second] = kept[second], kept[first]
        copies = [_copy(value) for value in kept]
        del values[:]
        values.extend(copies)
    elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        values.add()
    elif kind == "change" and values:
        place = random_.randrange(len(values))
        values[place] = _value(values[place], field, random_)
    else:
        values.append(_value(values[0] if values else field.default_value or 0, field, random_))


def _copy(value: Any) -> Any:
    if not isinstance(value, Message):
        return value
    copy = type(value)()
    copy.CopyFrom(value)
    return copy


def _value(now: Any, field: FieldDescriptor, random_: random.Random) -> Any:
    if field.type == FieldDescriptor.TYPE_BYTES:
        data = bytes(now) if isinstance(now, bytes) else b""
        return random_.choice(
            (b"", data[: len(data) // 2], data + data, data + b"\0", b"\xff\xfe", random_.randbytes(9))
        )
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return random_.choice(TEXTS)
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return random_.choice((*field.enum_type.values_by_number, 99))
    if field.cpp_type in _INTEGER_TYPES:
        return random_.choice(INTEGERS if random_.random() < 0.7 else (int(now) + 1, int(now) - 1, int(now) * 2))
    return random_.choice(FLOATS)
