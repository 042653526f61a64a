"""Makes the shipped profiles again, as compact JSON.

    python profiles/make.py                      # the analytic ones; minutes, no GPU
    python profiles/make.py llama-70b            # those of one model
    python profiles/make.py --pipedream FOLDER   # the V100 ones, from PipeDream's own graph files

The measured ones name their command in README.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from autopipe.core import files
from autopipe.core.hardware import HARDWARE
from autopipe.core.profile import Profile
from autopipe.importers import Facts, import_profile

HERE = Path(__file__).parent
BIG, SMALL = ("h100", "a100"), ("h100", "a100", "l4", "rtx4090")
MODELS = {
    "gpt2-small": ("gpt2.py:small", (1, 4, 16), SMALL),
    "gpt2-medium": ("gpt2.py:medium", (1, 4, 16), SMALL),
    "gpt2-large": ("gpt2.py:large", (1, 4, 16), SMALL),
    "gpt2-xl": ("gpt2.py:xl", (1, 2, 4, 8), SMALL),
    "bert-large": ("bert_large.py", (1, 4, 16), SMALL),
    "vit-large": ("vit_large.py", (1, 8, 32), SMALL),
    "llama-1b": ("llama.py:b1", (1, 2, 4), SMALL),
    "llama-3b": ("llama.py:b3", (1, 2, 4), SMALL),
    "llama-8b": ("llama.py:b8", (1, 2, 4), SMALL),
    "llama-70b": ("llama.py:b70", (1, 2, 4), BIG),
    "mixtral-8x7b": ("mixtral.py", (1, 2, 4), BIG),
}
"""Models by name: the file in models/, the micro-batch sizes, and the devices."""
PIPEDREAM = {"alexnet": 256, "vgg16": 128, "squeezenet1_0": 256, "resnet50": 128, "inception_v3": 128, "gnmt": 32}
"""PipeDream's graphs and their batch sizes. A file does not name its own, but has it in the bytes of its input: 128
images of 3 × 224 × 224 floats are 77,070,336. For gnmt a hidden state of 1,024 floats takes 131,072 bytes, so 32."""
LICENCE = "github.com/msr-fiddle/pipedream, measured on V100 by its authors; MIT licence, © Microsoft Corporation"


def analytic(names: Iterable[str]) -> None:
    """Write the analytic profiles of some models."""
    from autopipe.runtime.measuring.analytic import analytic_profiles

    for name in names:
        path, sizes, devices = MODELS[name]
        hardware = [HARDWARE[device] for device in devices]
        made = analytic_profiles(str(HERE / "models" / path), hardware, micro_batches=sizes)
        for device, profile in zip(devices, made, strict=True):
            write(replace(profile, model=name), f"{name}.{device}")


def imported(folder: Path) -> None:
    """Write PipeDream's profiles."""
    for name, batch in PIPEDREAM.items():
        made = import_profile(str(folder / f"{name}.txt"), "pipedream", Facts(f"{name}.txt", batch, "v100"))
        write(replace(made, sources=(*made.sources, LICENCE)), f"{name}.v100")


def write(profile: Profile, name: str) -> None:
    """Write a profile without blanks, and say so."""
    path = HERE / f"{name}.profile.json"
    files.write_text(json.dumps(json.loads(files.to_json(profile)), separators=(",", ":"), ensure_ascii=False), path)
    print(f"{path.name:36} {len(profile.layers):4} layers  {path.stat().st_size / 1e3:6.0f} kB", flush=True)


def main() -> None:
    """Parse and make."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--pipedream", type=Path, metavar="FOLDER")
    asked = parser.parse_args()
    if asked.pipedream:
        imported(asked.pipedream)
    else:
        analytic(asked.names or MODELS)


if __name__ == "__main__":
    main()
