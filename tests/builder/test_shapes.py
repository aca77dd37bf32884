"""Profiles derived from a model's inputs, and their override in trtexec's syntax."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_nvfp4.builder.errors import MODEL_AT_FAULT, USAGE, BuilderError
from trt_nvfp4.builder.shapes import derive_profiles, parse_shapes

names = st.text(st.characters(codec="ascii", exclude_characters=","), min_size=1).filter(lambda name: name.strip())
shapes = st.lists(st.integers(0, 10**6), min_size=1, max_size=6).map(tuple)


@given(st.dictionaries(names, shapes, max_size=4))
def test_parse_shapes_reads_what_is_written(wanted: dict[str, tuple[int, ...]]) -> None:
    text = ",".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in wanted.items())
    assert parse_shapes(text, "--min-shapes") == wanted


@pytest.mark.parametrize("text", ["x", "x:", "x:1x", "x:axb", "x:1 x 2", "x:-1x2"])
def test_parse_shapes_names_the_flag(text: str) -> None:
    with pytest.raises(BuilderError, match="--opt-shapes") as failure:
        parse_shapes(text, "--opt-shapes")
    assert failure.value.exit_code == USAGE


def test_parse_shapes_refuses_a_second_shape() -> None:
    with pytest.raises(BuilderError, match="--opt-shapes: gives x twice"):
        parse_shapes("x:1x64,x:2x64", "--opt-shapes")


def test_dimension_of_minus_one_is_dynamic() -> None:
    profile = derive_profiles({"x": [-1, 64]}, most={"x": (4, 64)})["x"]
    assert (profile.least, profile.most) == ((1, 64), (4, 64))


def test_input_that_takes_no_values() -> None:
    with pytest.raises(BuilderError, match="'x': dimension 1 is 0") as failure:
        derive_profiles({"x": ["batch", 0]})
    assert failure.value.exit_code == MODEL_AT_FAULT


def test_text_model_gets_batch_and_sequence_ranges() -> None:
    profiles = derive_profiles({"input_ids": ["batch", "sequence"], "pixel_values": ["batch", 3, 224, 224]})
    assert profiles["input_ids"].least == (1, 1)
    assert profiles["input_ids"].most == (8, 512)
    assert profiles["pixel_values"].most == (8, 3, 224, 224)


def test_sequence_ends_where_the_model_does() -> None:
    profile = derive_profiles({"input_ids": ["batch", "seq_len"]}, longest=64)["input_ids"]
    assert (profile.typical, profile.most) == ((1, 64), (8, 64))


def test_static_inputs_need_no_profile() -> None:
    assert derive_profiles({"x": [1, 16]}) == {}


def test_one_override_widens_the_others() -> None:
    profile = derive_profiles({"x": ["batch", "sequence"]}, most={"x": (2, 2048)}, least={"x": (1, 1024)})["x"]
    assert profile.least == (1, 1024)
    assert profile.typical == (1, 1024)
    assert profile.most == (2, 2048)


def test_meaningless_dimension_asks_for_a_range() -> None:
    with pytest.raises(BuilderError, match=r"image.*dimension 2 \(height\).*--max-shapes image:") as failure:
        derive_profiles({"image": ["batch", 3, "height", 224]})
    assert failure.value.exit_code == USAGE


def test_override_gives_the_range_of_a_meaningless_dimension() -> None:
    profile = derive_profiles({"image": [1, "height"]}, most={"image": (1, 640)})["image"]
    assert (profile.least, profile.typical, profile.most) == ((1, 640), (1, 640), (1, 640))


@pytest.mark.parametrize(
    ("override", "text"),
    [({"y": (1,)}, "no input 'y'"), ({"x": (1, 2, 3)}, "does not fit"), ({"x": (1, 32)}, "does not fit")],
)
def test_override_that_does_not_fit(override: dict[str, tuple[int, ...]], text: str) -> None:
    with pytest.raises(BuilderError, match=text) as failure:
        derive_profiles({"x": ["batch", 16]}, typical=override)
    assert failure.value.exit_code == USAGE


def test_bounds_out_of_order() -> None:
    with pytest.raises(BuilderError, match="out of order"):
        derive_profiles({"x": ["batch"]}, least={"x": (4,)}, most={"x": (2,)})
