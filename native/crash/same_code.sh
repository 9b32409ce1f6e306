#!/usr/bin/env bash
# The release build has no trace of the tracing, nor of fault injection: each object's instructions
# and relocations are those of a copy of its source from which every trace call, every mutant and
# every fault point was cut out, and which makes its system calls directly.
#
# same_code.sh FOLDER OBJECTS COMPILE...
# OBJECTS: folder of the release's; COMPILE: what they were compiled with, up to `-o`.
set -euo pipefail
folder=$1
objects=$2
shift 2
rm -rf "$folder"
mkdir -p "$folder/cut"

for file in native/src/*.c native/src/*.h; do
  sed -e 's/lck_trace[a-z_]*(LCK_TRACE_[^;]*;/;/' -e 's/lck_trace_payload(region[^;]*;/;/' \
    -e 's/lck_trace_granularity(\(region->granularity\))/\1/' -e 's/LCK_MUTANT([A-Z_]*)/0/g' \
    -e 's/lck_call_getrlimit(/getrlimit(RLIMIT_FSIZE, /' -e 's/lck_call_\([a-z]*\)(/\1(/g' \
    -e 's/lck_fault_visit(LCK_[A-Z_]*)/0/g' \
    "$file" >"$folder/cut/$(basename "$file")"
done
if grep -n 'lck_trace\|LCK_MUTANT\|lck_call\|lck_fault_visit(LCK' "$folder"/cut/*.c; then
  echo "FAILED: these calls are still in the copy"
  exit 1
fi

code() {
  objdump -d -r "$1" | tail -n +4
}

compared=0
for file in native/src/*.c; do
  name=$(basename "$file" .c)
  "${@//-Inative\/src/-I$folder/cut}" -w -o "$folder/cut/$name.o" "$folder/cut/$name.c"
  if nm "$objects/$name.o" | grep 'lck_trace\|lck_mutant\|lck_fault'; then
    echo "FAILED: the release build of $file has the symbols above"
    exit 1
  fi
  if ! cmp -s <(code "$objects/$name.o") <(code "$folder/cut/$name.o"); then
    echo "FAILED: the release build of $file differs from one without tracing and fault injection"
    exit 1
  fi
  compared=$((compared + 1))
done
echo "$compared release objects: the same instructions as without tracing and faults"
