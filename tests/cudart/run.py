"""Runs these tests on a stand-in for CUDA's runtime: `python tests/cudart/run.py [pytest's]`.

Needs torch's build for CUDA 13 (`pip install torch==2.11.0`), gcc and nm; no GPU, no driver.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parents[1]
_MADE = _ROOT / "build" / "cudart"
_FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-O2", "-g", "-Wall", "-Wextra", "-fPIC", "-shared"]
_DRIVER = """
int cudaThreadExchangeStreamCaptureMode(int *);
int cudaStreamCreateWithPriority(void **, unsigned, int);
int stand_contexts(void);
int cuThreadExchangeStreamCaptureMode(int *mode) {
    return cudaThreadExchangeStreamCaptureMode(mode);
}
int cuStreamCreateWithPriority(void **made, unsigned flags, int priority) {
    return cudaStreamCreateWithPriority(made, flags, priority);
}
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    return *flags = 0, *active = (stand_contexts() >> device) & 1, 0;
}
"""


def asked(library: Path, prefix: str) -> set[str]:
    """Return the symbols that a library asks of others, with their versions."""
    said = subprocess.check_output(["nm", "-D", "--undefined-only", library], text=True)
    return set(re.findall(rf" U ((?:__)?{prefix}[A-Z]\S*)", said))


def stubs(names: set[str], there: str) -> str:
    """Functions that nobody is expected to call: not supported, and they say so."""
    own = set(re.findall(r"\b((?:__)?cu\w+)\(", there))
    line = 'int {0}(void); int {0}(void) {{ return fputs("cudart: {0}\\n", stderr), 801; }}\n'
    return "#include <stdio.h>\n" + "".join(line.format(name) for name in sorted(names - own))


def main() -> None:
    """Build it, and become pytest with it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None, "no torch here"
    torch = Path(spec.origin).parent / "lib"
    names = {name for file in torch.glob("lib*.so") for name in asked(file, "cuda")}
    (version,) = {name.partition("@")[2] for name in names} or {""}
    assert version == "libcudart.so.13", f"torch is not built for CUDA 13: {version or 'a CPU'}"
    _MADE.mkdir(parents=True, exist_ok=True)
    sources = [_HERE / "cudart.c", _HERE / "streams.c"]
    there = "".join(file.read_text() for file in sources)
    (_MADE / "rest.c").write_text(stubs({name.partition("@")[0] for name in names}, there))
    (_MADE / "map").write_text(f"{version} {{ global: *; }};\n")
    library, driver = _MADE / version, _MADE / "libcuda.so.1"
    names_its = ["-pthread", f"-Wl,-soname,{version}", f"-Wl,--version-script,{_MADE / 'map'}"]
    command = ["gcc", *_FLAGS, *names_its, "-o", library, *sources, _MADE / "rest.c"]
    subprocess.run(command, check=True)
    text = _DRIVER + stubs(asked(torch / "libcaffe2_nvrtc.so", "cu"), _DRIVER)
    (_MADE / "driver.c").write_text(text)
    command = [
        "gcc",
        *_FLAGS,
        "-Wl,-soname,libcuda.so.1",
        "-o",
        driver,
        _MADE / "driver.c",
        library,
    ]
    subprocess.run(command, check=True)
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
    sys.path.insert(0, str(_ROOT))
    from bench.gpu import build

    more = {
        "LIGHTCK_NATIVE": str(build.library()),
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": str(_MADE),
        "LIGHTCK_CUDART": "1",
    }
    words = ["-m", "pytest", str(_HERE), "-p", "no:cacheprovider", "-W", "default", *sys.argv[1:]]
    os.execve(sys.executable, [sys.executable, *words], {**os.environ, **more, "PYTHONPATH": path})


if __name__ == "__main__":
    main()
