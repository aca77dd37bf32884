"""The spelling of recipes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_nvfp4.calibration import recipes
from trt_nvfp4.common.errors import CalibrationError


@given(st.permutations(["local-hessian", "gptq", "quantized-inputs"]))
def test_parts_may_come_in_any_order(parts: list[str]) -> None:
    recipe = recipes.parse("+".join(parts))
    assert str(recipe) == "local-hessian+gptq+quantized-inputs"
    assert recipes.parse(str(recipe)) == recipe == recipes.parse(recipe)
    assert recipe.needs >= {"block_gram", "quantized_hessian"}
    assert recipe.for_16_bit_activations().needs == {"block_gram", "hessian"}


@pytest.mark.parametrize(("name", "search"), [("activation-four-over-six", 1), ("activation-sweep", 2)])
def test_scales_of_activations_concern_no_weight(name: str, search: int) -> None:
    recipe = recipes.parse(f"{name}+mse")
    assert str(recipe) == f"mse+{name}"
    assert recipe.scale_search == search
    assert recipe.needs == set()
    assert recipe.for_16_bit_activations() == recipe.for_weights() == recipes.parse("mse")


def test_what_recipes_need() -> None:
    for name in ("max", "four-over-six", "mse"):
        assert recipes.parse(name).needs == set()
    assert recipes.parse("diagonal").needs == {"mean_square"}
    assert recipes.parse("gptq").needs == {"hessian"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "unknown part ''; known: max, "),
        ("mse+gtpq", "unknown part 'gtpq'; did you mean 'gptq'"),
        ("mse+max", "mse and max both choose the block scales"),
        ("mse+mse", "'mse' is named twice"),
        ("mse+activation-sweep+activation-four-over-six", "both choose the block scales of activations"),
        ("mse+quantized-inputs", r"'quantized-inputs' is an option of gptq; add \+gptq"),
        ("gptq+activation-order", "'activation-order' was removed"),
        ("MSE", "unknown part 'MSE'"),
    ],
)
def test_misspelt_recipes(text: str, message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        recipes.parse(text)
