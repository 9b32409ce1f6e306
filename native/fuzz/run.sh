#!/usr/bin/env bash
# Build the fuzzer and let it run; what it finds stays in FOLDER and fails the run.
#
# run.sh FOLDER SECONDS FLAG...
set -euo pipefail
folder=$1
seconds=$2
shift 2
proof=build/proof/fuzz-native.json
rm -f "$proof"
mkdir -p "$folder/seeds" "$folder/corpus" "$folder/found" "$(dirname "$proof")"

clang=$(command -v clang || command -v clang-14 || true)
if [ -z "$clang" ]; then
  echo "SKIPPED: the native fuzzer needs clang (apt-get install clang libclang-rt-14-dev)"
  exit 0
fi
# Tables of at most 1 MiB: beside the limit itself nothing depends on it, and inputs stay fast.
flags=("$@" -O1 -g '-DLCK_TABLE_LIMIT=UINT64_C(1048576)' -fsanitize=fuzzer,address,undefined
  -fno-sanitize-recover=all)
if ! echo 'int LLVMFuzzerTestOneInput(const char *d, long n) { return !d && n; }' |
  "$clang" -fsanitize=fuzzer,address,undefined -x c -o "$folder/probe" - 2>"$folder/probe.log"; then
  echo "SKIPPED: $clang has no libFuzzer runtime (apt-get install libclang-rt-14-dev):"
  tail -n 1 "$folder/probe.log"
  exit 0
fi
"$clang" "${flags[@]}" -o "$folder/fuzz_region" native/fuzz/*.c native/src/*.c

status=0
rm -f "$folder/count"
FUZZ_SEEDS="$folder/seeds" FUZZ_COUNT="$folder/count" "$folder/fuzz_region" \
  -max_total_time="$seconds" -max_len=6000 -timeout=20 -rss_limit_mb=2048 -verbosity=0 \
  -artifact_prefix="$folder/found/" "$folder/corpus" "$folder/seeds" 2>"$folder/log" || status=$?
if [ "$status" -ne 0 ]; then
  tail -n 40 "$folder/log" >&2
  echo "FAILED: the fuzzer ended with status $status; inputs are in $folder/found" >&2
  exit 1
fi
count=$(cat "$folder/count")
printf '{"crashes": 0, "libfuzzer_executions": %s, "seconds": %s}\n' "$count" "$seconds" >"$proof"
echo "fuzz: $count inputs in $seconds s, 0 crashes"
