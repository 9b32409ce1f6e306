"""A spare has imported, before it is needed, what a replacement's script will use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from lightck.inplace.spare import PRELOADED

_SCRIPT = """
import contextlib, importlib, sys
for name in sys.argv[2].split(","):
    with contextlib.suppress(ModuleNotFoundError):  # not every torch has all
        importlib.import_module(name)
before = {*sys.modules}
import torch, lightck
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
lightck.restore(model, optimizer, sys.argv[1])
with lightck.attach(model, optimizer, sys.argv[1], policy=1):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print(*sorted({*sys.modules} - before))
"""


def test_restore_attach_and_a_step_import_nothing_that_a_spare_has_not(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(tmp_path / "run"), ",".join(PRELOADED)],
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    late = [
        name for name in done.stdout.split() if name.startswith(("lightck", "pyarrow", "torch"))
    ]
    assert late == []
