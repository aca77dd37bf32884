"""A build that the pipeline carries out."""

from pathlib import Path
from typing import Any, TypeVar

import attrs
from attrs import field

from trt_nvfp4.builder.errors import UsageError
from trt_nvfp4.builder.export.fixed_sizes import FixedSizes, ImageSize
from trt_nvfp4.builder.model.decoder_contract import AUTO
from trt_nvfp4.builder.model.model_files import ENGINES, is_eagle
from trt_nvfp4.builder.options import entries_of
from trt_nvfp4.builder.pipeline.build_options import PLAN, PLAN_WITHOUT_REQUIRE, BuildOptions

_T = TypeVar("_T", bound=BuildOptions)
#: What files of models are called that `surgery` has changed.
SURGERY = ".surgery.onnx"


@attrs.frozen
class Request(BuildOptions):
    """A build with the pipeline's own properties."""

    #: One graph of a model of several, which may have nothing to replace.
    is_part: bool = field(default=False, kw_only=True)
    #: Such a part whose first and last products stay in 16 bits.
    is_denoiser: bool = field(default=False, kw_only=True)

    #: A drafter, which is built without calibration data.
    is_drafter: bool = field(default=False, kw_only=True)

    @property
    def base(self) -> Path:
        """Every file of a run is called this and a suffix."""
        if self.output is not None:
            # Names hold dots of their own: Qwen2.5-7B.
            return self.output.with_suffix("") if self.output.suffix in ENGINES else self.output
        if self.bundle is not None:
            return self.bundle
        raise UsageError("no output is given: add -o OUT.engine or --bundle DIR")

    @property
    def fixed_sizes(self) -> FixedSizes:
        """Sizes that an export without caches fixes. Raises UsageError for an invalid size of images."""
        image = None if self.image_size is None else ImageSize.parse(self.image_size)
        return FixedSizes(image, self.batch)

    @property
    def head(self) -> str | None:
        """The head that drafts from the model's hidden states, as `CacheOptions.draft`."""
        return self.draft if self.draft == AUTO or is_eagle(Path(self.draft)) else None

    @property
    def runs_model(self) -> bool:
        """Whether something runs the exported model, or changes it as a file."""
        return self.calib_data is not None or self.surgery is not None

    def file(self, suffix: str) -> Path:
        return self.base.with_name(self.base.name + suffix)


def with_needs_of_budget(request: Request) -> Request:
    """The request with what its accuracy budget needs: perplexity is measured on the logits of every token."""
    budget = request.accuracy_budget
    if budget is None or budget.metric != "perplexity" or not request.model.is_dir() or request.task == "features":
        return request
    return attrs.evolve(request, all_logits=True)


def part_of(request: Request, model: Path, base: Path, **changes: Any) -> Request:
    """The request for one of several engines, whose files are named after `base`. Options of the export, adapters
    included, are done with."""
    bundled = request.bundle is not None
    done: dict[str, Any] = {"task": "auto", "cache_capacity": None, "max_batch": None, "adapter": None, "draft": "none"}
    return attrs.evolve(
        request,
        model=model,
        output=None if bundled else base.with_name(f"{base.name}.engine"),
        bundle=base if bundled else None,
        **done,
        **changes,
    )


def planned(request: _T, plan: Path) -> _T:
    """`request` as it is carried out once `plan` has decided."""
    decided = {PLAN} if request.require is not None else {PLAN, PLAN_WITHOUT_REQUIRE}
    defaults: dict[str, Any] = {
        entry.name: entry.default
        for entry in entries_of(type(request))
        if entry.name == "recipe" or decided & set(entry.option.ignored_with)
    }
    return attrs.evolve(request, plan=plan, **defaults)
