#!/usr/bin/env bash
# Wrong builds of the release, each one mistake made in a copy of its source: programs under trace,
# linked from the mutant's object and the release's others.
#
# mutants.sh FOLDER RELEASE-FOLDER PROGRAM-OBJECT... -- LINK-COMMAND... -- COMPILE-COMMAND...
# Prints "KERNEL<tab>PROGRAM<tab>NAME" for each.
set -euo pipefail
folder=$1 release=$2
shift 2
program=() link=() compile=()
while [ "$1" != -- ]; do program+=("$1") && shift; done
shift
while [ "$1" != -- ]; do link+=("$1") && shift; done
shift
compile=("$@")

seed() { # KERNEL NAME FILE SED-EXPRESSION
  local kernel=$1 name=$2 file=$3 place="$folder/${2// /-}"
  mkdir -p "$place"
  sed -e "$4" "native/src/$file.c" >"$place/$file.c"
  if cmp -s "native/src/$file.c" "$place/$file.c"; then
    echo "FAILED: mutant '$name' changes nothing in native/src/$file.c" >&2
    exit 1
  fi
  "${compile[@]}" -w -o "$place/$file.o" "$place/$file.c"
  local objects=()
  for source in native/src/*.c; do # not every object there is: that of a removed source may remain
    base=$(basename "$source" .c)
    [ "$base" = "$file" ] || objects+=("$release/$base.o")
  done
  "${link[@]}" -o "$place/tracee" "${program[@]}" "$place/$file.o" "${objects[@]}"
  printf '%s\t%s\t%s\n' "$kernel" "$place/tracee" "$name"
}

mistake() { # MUTANT: one that the crash enumerator knows, compiled in
  echo "s/LCK_MUTANT($1)/1/"
}

seed sse42 "nothing is flushed" persist 's/^ *flush_range(current_method(), .*/;/'
seed sse42 "only the first line is flushed" persist 's/region->base + offset + length);/region->base + first + 1);/'
seed portable "payload through the cache not flushed" persist "$(mistake MUTANT_PAYLOAD_NOT_FLUSHED)"
seed sse42 "no fence before the record's word" commit "$(mistake MUTANT_BODY_NOT_FENCED)"
seed sse42 "no fence before the record" commit "$(mistake MUTANT_TABLES_NOT_SYNCED)"
seed sse42 "a chunk is not fenced" batch "$(mistake MUTANT_WORKER_NOT_FENCED)"
seed sse42 "a store past the primitives" commit \
  's/^  uint64_t word = block.sequence;/&\n  *(volatile unsigned char *)(region->base + LCK_RECORD_OFFSET(slot) + 8) = 0;/'
seed sse42 "payload streamed through the cache" kernel_sse42 's/_mm_stream_si128/_mm_store_si128/'
seed sse42 "the published word is torn" persist \
  's/^  __atomic_store_n(there, to.word, __ATOMIC_RELEASE);/  for (int i = 0; i < 8; i++)\n    ((volatile unsigned char *)there)[i] = (unsigned char)(to.word >> 8 * i);/'
