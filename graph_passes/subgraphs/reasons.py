"""Why a subgraph is computed as it is: a text for people, and a code that programs may depend on."""

from dataclasses import dataclass

from trt_nvfp4.graph_passes.subgraphs.text_enum import TextEnum


class ReasonCode(TextEnum):
    """The kind of a reason. Codes are stable: plans and reports hold them."""

    #: The first choice of the requested precision.
    PREFERRED = "preferred"
    NO_CALIBRATION = "no_calibration_data"
    FASTER_IN_FP8 = "faster_in_fp8"
    FASTER_IN_W4A4 = "faster_in_w4a4"
    PUBLISHED_IN_FP8 = "published_in_fp8"
    #: So few rows that reading the weights takes all its time.
    FEW_ROWS = "few_rows"
    #: It embeds an input of a denoiser, or makes its output.
    EDGE = "first_or_last"
    ACCURACY_BUDGET = "accuracy_budget"
    #: The decision was edited in the plan file.
    EDITED = "edited"
    KIND = "kind_not_selected"
    NOT_INCLUDED = "not_included"
    EXCLUDED = "excluded"
    #: The model brought the plugin node.
    BY_HAND = "by_hand"
    #: A choice, such as a router's, depends on its values.
    FEEDS_A_CHOICE = "feeds_a_choice"
    #: Recognised, but nothing can replace it.
    NOT_REPLACEABLE = "not_replaceable"
    TARGET = "unsupported_by_target"
    NO_KERNELS = "no_kernels_of_its_own"
    K_ALIGNMENT = "k_not_a_multiple_of_16"
    MIXED_TYPES = "mixed_types"
    ORIENTATION = "weight_in_both_orientations"
    RANK = "unsupported_rank"
    MOE_LAYER = "unsupported_by_moe_layer"
    KIND_UNSUPPORTED = "unsupported_kind"


@dataclass(frozen=True)
class Reason:
    """A code, which programs may depend on, and its text for people."""

    code: ReasonCode
    text: str
