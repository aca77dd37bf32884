"""For `polygraphy plugin`: see trt_nvfp4.polygraphy_patterns."""

from trt_nvfp4.polygraphy_patterns import Pattern

_PATTERN = Pattern("NVFP4Linear")
get_plugin_metadata = _PATTERN.get_plugin_metadata
get_matching_subgraphs = _PATTERN.get_matching_subgraphs
replace_with_plugin = _PATTERN.replace_with_plugin
