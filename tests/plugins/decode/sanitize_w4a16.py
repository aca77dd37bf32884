"""Run as a program under compute-sanitizer: the W4A16 kernel at small odd shapes, each tensor its own allocation.

Run with PYTORCH_NO_CUDA_MEMORY_CACHING=1.
"""

import sys

import numpy as np
import op_inputs
import torch

from trt_nvfp4.plugins.host import PluginHost

W4A16, W4A16_MMA_SYNC, W4A16_SM90 = 2, 6, 8


def main(library: str) -> None:
    host = PluginHost(library)
    rng = np.random.default_rng()
    for dtype in (torch.float16, torch.bfloat16):
        for m in (1, 3, 9, 20, 40):
            calls = [
                ("NVFP4Linear", op_inputs.linear(rng, m, 77, 1056, dtype).inputs, {"activation": 3}),
                ("NVFP4GatedMLP", op_inputs.gated_mlp(rng, m, 96, 64, 33, dtype).inputs, {"activation": 7}),
                (
                    "NVFP4PersistentMLP",
                    op_inputs.persistent_mlp(rng, 3, m, 544, 1056, 544, dtype, gated=1).inputs,
                    {"activation": 5, "gated": 1, "norm": 1, "residual": 1},
                ),
            ]
            tactics = [(call, W4A16) for call in calls]
            if m in (3, 9):  # small linears by clusters, and with rings that are filled again
                k = 10528 if m == 3 else 2080
                long = op_inputs.linear(rng, m, 2817 if m == 3 else 40, k, dtype).inputs
                tactics.append((("NVFP4Linear", long, {"activation": 3}), W4A16))
            if m <= 16:  # W4A16's is the kernel for small linears
                tactics.append((calls[0], W4A16_MMA_SYNC))
            if torch.cuda.get_device_capability() == (9, 0):
                tactics += [(call, W4A16_SM90) for call in calls]
                if m == 40:  # more of K for a block than shared memory holds at once
                    many = op_inputs.linear(rng, m, 11008, 4096, dtype).inputs
                    tactics.append((("NVFP4Linear", many, {"activation": 0}), W4A16_SM90))
            for (op, tensors, attributes), tactic in tactics:
                inputs = [x.cuda() for x in tensors]
                with host.session(op, inputs, attributes, tactic=tactic) as session:
                    (shape,) = session.output_shapes(inputs)
                    y = torch.empty(shape, dtype=dtype, device="cuda")
                    workspace = torch.empty(session.workspace_size, dtype=torch.uint8, device="cuda")
                    session.enqueue(inputs, [y], workspace)
                    torch.cuda.synchronize()
                    y.cpu()  # initcheck sees what was left unwritten


if __name__ == "__main__":
    main(sys.argv[1])
