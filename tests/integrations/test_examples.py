"""Every example is put through `lightck chaos`, as its reader would: the end is bit for bit.

The examples of frameworks need those; so all of them are run here, where they are installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SINGLE = {
    "minimal": ("", "--epochs=3"),
    "nanogpt": ("", "--steps=80"),
    "lightning_fit": ("lightning", "--epochs=3"),
    "hf_trainer_lora": ("peft", "--epochs=1"),
    "accelerate_loop": ("accelerate", "--epochs=5"),
    "deepspeed_zero": ("deepspeed", "--epochs=3"),
}
"""Examples of one process: the package that each needs, and its length here."""
RANKS = {"ddp": "--epochs=5", "fsdp2": "--epochs=5"}
FAULTS = {
    # Lightning ends a training that has got SIGTERM by itself, also within a validation.
    "lightning_fit": ["--fault=term:20:between", "--fault=term:64:evaluation", "--fault=kill:70"],
}
"""The faults that an example is put through, where the places matter."""
ANY_FAULTS = ["--kinds=kill,term"]
"""The faults of the other examples: at random places."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [*SINGLE, *RANKS])
def test_an_example_is_killed_and_ends_bit_for_bit(name: str, tmp_path: Path) -> None:
    needs, length = SINGLE.get(name, ("", RANKS.get(name, "")))
    if needs and find_spec(needs) is None:
        pytest.skip(f"SKIPPED: {needs} is not installed: make integrations")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *(launcher if name in RANKS else [])]
    command += [str(ROOT / "examples" / f"{name}.py"), length]
    chaos = [sys.executable, "-m", "lightck.cli", "chaos", *FAULTS.get(name, ANY_FAULTS)]
    chaos += ["--quiet=300", "--", *command]
    kept = {k: v for k, v in os.environ.items() if not k.startswith("LIGHTCK_")}
    kept |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    try:
        ended = subprocess.run(chaos, cwd=tmp_path, env=kept, capture_output=True, text=True)
    finally:
        shutil.rmtree(tmp_path, ignore_errors=True)
    print(ended.stdout)
    assert ended.returncode == 0 and "IDENTICAL: " in ended.stdout, ended.stdout + ended.stderr
    if name == "lightning_fit":  # between two batches nothing is lost
        assert re.search(r"term:20:between:0 .* 20 +20 +0 steps", ended.stdout), ended.stdout


def test_every_example_is_among_them() -> None:
    there = {file.stem for file in (ROOT / "examples").glob("*.py")}
    assert there == {*SINGLE, *RANKS}
