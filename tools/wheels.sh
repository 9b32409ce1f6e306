#!/usr/bin/env bash
# Build the sdist, and from it a wheel for each architecture, into dist/; check all of them.
# Argument: the folder of a Python that has what tools/wheels.txt names (`make wheels` makes one).
#
# zig cc brings the headers and symbols of glibc 2.28 for both architectures: no container, no root,
# no cross compiler. Same commit, same wheels, byte for byte: times are the commit's, tools are pinned,
# the build's paths are stripped.
set -euo pipefail
bin=$(realpath "$1")
cd "$(dirname "$0")/.."
work=$PWD/build/wheels
export PATH=$bin:$PATH  # auditwheel looks for patchelf
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export ZIG_GLOBAL_CACHE_DIR=$work/zig ZIG_LOCAL_CACHE_DIR=$work/zig
umask 022
rm -rf dist/lightck-* "$work/linux"

# Of this machine's architecture alone --plat can be said; the wheel's own is meant.
repair() {
  python -c 'import platform, sys; platform.machine = lambda: sys.argv.pop(1)
from auditwheel.main import main; sys.exit(main())' "$1" repair --plat "manylinux_2_28_$1" -w dist "$2"
}
quietly() { "$@" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }; }

echo "sdist"
quietly python -m build --no-isolation --sdist .
for architecture in x86_64 aarch64; do
  echo "wheel for $architecture"
  # LDSHARED too: Python's own may name folders of this machine. -s: without paths for debuggers.
  zig="python -m ziglang cc -target $architecture-linux-gnu.2.28"
  CC=$zig LDSHARED="$zig -shared -s" _PYTHON_HOST_PLATFORM=linux-$architecture \
    quietly pip wheel --no-build-isolation --no-deps --no-cache-dir -w "$work/linux" dist/lightck-*.tar.gz
  quietly repair $architecture "$work"/linux/*_$architecture.whl
done
# A compiler's library that knows nothing of the CPU would leave the portable kernel, and no error.
fastest() {
  for needed in "avx512 avx512f avx512vl avx512bw vpclmulqdq" "avx2 avx2 pclmulqdq" "sse42 sse4_2" \
    "aarch64 crc32"; do
    read -r name flags <<<"$needed"
    for flag in $flags; do grep -qwm1 "$flag" /proc/cpuinfo || continue 2; done
    echo "$name" && return
  done
  echo portable
}
python -m zipfile -e dist/*_"$(uname -m)".whl "$work/linux/here"
chosen=$(python -c 'import ctypes, sys; name = ctypes.c_char_p()
ctypes.CDLL(sys.argv[1]).lck_kernel(None, ctypes.byref(name)); print(name.value.decode())' \
  "$work/linux/here/lightck/_native.abi3.so")
echo "copy kernel on this CPU: $chosen"
[ "$chosen" = "$(fastest)" ] || { echo "FAILED: it has $(fastest)"; exit 1; }

for wheel in dist/*.whl; do auditwheel show "$wheel"; done
abi3audit --strict --summary --verbose dist/*.whl
twine check --strict dist/*
(cd dist && sha256sum lightck-*)
