"""The files of a policy's bundle beside the bundles of its parts: a script that runs the policy with NumPy only."""

from pathlib import Path

from trt_nvfp4.builder.tensorrt.bundle import GENERATE_MODULES, MODULES, script_of, write_modules

SCRIPT = "run_policy.py"
#: The modules that it runs beside those of language models, which hold the tokenizer.
POLICY_MODULES = (
    *(f"builder/components/{name}.py" for name in ("__init__", "chain", "manifest", "settings")),
    *(f"builder/components/devices/{name}.py" for name in ("__init__", "device", "tensorrt_device")),
    *(f"builder/components/policies/{name}.py" for name in ("__init__", "policy", "processing", "script")),
)


def write_script(folder: Path) -> None:
    """Write SCRIPT and its modules into a policy's bundle."""
    (folder / SCRIPT).write_text(
        script_of("Runs the policy of this folder on observations", "components.policies.script", 10)
    )
    write_modules(folder, (*MODULES, *GENERATE_MODULES, *POLICY_MODULES))
