"""A spare has imported, before it is needed, what a replacement's script will use."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from lightck.inplace.spare import PRELOADED, Spare, WatchedEnvironment

WORKER = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
WORKER |= {"GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
WORKER |= {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "OMP_NUM_THREADS": "1"}

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


def became(tmp_path: Path, modules: dict[str, str], script: str, preload: str) -> tuple[str, str]:
    """Let a spare that has imported a module be a worker; return what it says, and its errors.

    Modules are by their path; `path/` is in PYTHONPATH, `script/` has the script, and `here/` is
    the working directory. The script's `imported_by` is the command that has imported a module.
    """
    for name in ("path", "script", "here"):
        (tmp_path / name).mkdir()
    for name, text in modules.items():
        (tmp_path / name).write_text(text)
    start = "import sys\nimported_by = lambda module: module.BY[3].rpartition('.')[2]\n"
    (tmp_path / "script/train.py").write_text(start + script)
    outputs = [tmp_path / "out", tmp_path / "err"]
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(tmp_path / "here")
        known = os.environ.get("PYTHONPATH", "")
        patched.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "path"), known]))
        patched.delenv("RANK", raising=False)
        spare = Spare([preload], str(tmp_path / "script"))
        arguments = [str(tmp_path / "script/train.py")]
        process = spare.become(WORKER, arguments, [*map(str, outputs)])
    assert process is spare.process
    process.wait(100)
    out, err = (each.read_text() if each.exists() else "" for each in outputs)
    assert process.returncode == 0, err
    return out, err


BY = "import sys\nBY = sys.orig_argv\n"


@pytest.mark.timeout(120)
def test_a_module_that_reads_the_rank_while_it_is_imported_reads_its_own(tmp_path: Path) -> None:
    """The spare has imported it before anybody knew whose place it takes."""
    reads = "import os\nRANK = int(os.getenv('RANK', 0))\n"
    script = "import ranked\nprint(ranked.RANK, imported_by(ranked), sys.argv[1:])\n"
    out, err = became(tmp_path, {"path/ranked.py": BY + reads}, script, "ranked")
    assert out == "1 worker []\n"
    assert err.count("spare_not_used") == 1
    assert "ranked read RANK while it was imported, which was not set then" in err


@pytest.mark.parametrize(
    "reads",
    [
        "os.getenv('RANK')",
        "os.environ.get('RANK', 0)",
        "'RANK' in os.environ",
        "os.environ.setdefault('RANK', '0')",
        "os.environ.pop('RANK', None)",
        "os.path.expandvars('$RANK')",
        "os.environ['RANK']",
    ],
)
def test_a_variable_is_read_in_each_way_that_there_is(
    reads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert noted(reads) == "ranked read RANK while it was imported, which was not set then"
    monkeypatch.setenv("RANK", "7")  # of the pod, of which the launcher knows another
    if "pop" not in reads:
        assert noted(reads) == "ranked read RANK while it was imported, which was 7 then"


@pytest.mark.parametrize(
    "reads",
    [
        "{**os.environ}",
        "os.environ.copy()",
        "dict(os.environ.items())",
        "os.environ | {'OWN': '1'}",
        "[*os.environ.values()]",
        "{k[5:]: v for k, v in os.environ.items() if k.startswith('TQDM_')}",
        "next(v for k, v in os.environ.items() if k == 'RANK')",
    ],
)
def test_who_passes_over_all_variables_has_read_none(
    reads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "7")
    assert noted(reads) == ""
    assert noted(f"{reads}; os.environ['RANK']").startswith("ranked read RANK")


def test_who_puts_all_variables_back_has_written_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")  # of the pod
    puts_back = "saved = os.environ.copy(); os.environ['OWN'] = '1'; os.environ.clear();"
    assert noted(f"{puts_back} os.environ.update(saved)") == ""


def noted(reads: str) -> str:
    """Return what is noted of a module's code by a spare that becomes rank 1."""
    before = {**os.environ}
    environment = WatchedEnvironment.watch()
    try:
        with suppress(KeyError):
            exec(reads, {"os": os, "__name__": "ranked"})
    finally:
        why = environment.become({**before, "RANK": "1"})
        told = {**os.environ}
        os.environ.clear()
        os.environ.update(before)
    assert told == {**before, "RANK": "1"}
    assert {**os.environ} == before
    return why


@pytest.mark.timeout(120)
def test_a_spare_is_used_where_its_modules_read_what_the_worker_has_too(tmp_path: Path) -> None:
    """So neither torch nor lightck reads anything of a worker's while it is imported."""
    reads = "import os\nos.environ['RANKED'] = os.environ['PATH']\n"
    reads += "os.environ.setdefault('ALSO', 'so')\nassert os.environ['ALSO'] == 'so'\n"
    script = "import ranked, os\nprint(imported_by(ranked), os.environ['RANK'])\n"
    script += "print(os.environ['RANKED'] == os.environ['PATH'], os.environ['ALSO'])\n"
    out, err = became(tmp_path, {"path/ranked.py": BY + reads}, script, "ranked")
    assert out == "spare 1\nTrue so\n", err
    assert "spare_not_used" not in err


@pytest.mark.timeout(120)
def test_a_spare_looks_for_modules_where_its_worker_does(tmp_path: Path) -> None:
    modules = {
        "path/package.py": f"{BY}import settings\nFROM = settings.FROM\n",
        "here/settings.py": "FROM = 'the working directory'\n",
        "script/settings.py": "FROM = 'beside the script'\n",
    }
    script = "import package\nprint(imported_by(package), package.FROM)\n"
    out, _ = became(tmp_path, modules, script, "package")
    assert out == "spare beside the script\n"
