#!/usr/bin/env bash
# Kill loops on every medium that this machine has; numbers to build/proof/kill-native.json.
#
# run.sh PROGRAM CYCLES [SEED]
set -euo pipefail
program=$1
cycles=$2
seed=${3:-$RANDOM$RANDOM}
proof=build/proof/kill-native.json
rm -f "$proof"
mkdir -p "$(dirname "$proof")"
memory=$(mktemp -d /dev/shm/lightck-kill-XXXXXX)
disk=$(mktemp -d /var/tmp/lightck-kill-XXXXXX)
huge=$(mktemp -d /tmp/lightck-kill-XXXXXX)
pages=/proc/sys/vm/nr_hugepages
before=
clean() {
  [ -z "$before" ] || { umount "$huge"; echo "$before" >"$pages"; }
  rm -rf "$memory" "$disk"
  rmdir "$huge"
}
trap clean EXIT

names=("native tmpfs" "native ext4 sync" "native ext4 process")
media=("${names[0]}=$memory" "${names[1]}=$disk" "${names[2]}=$disk")
if [ -w "$pages" ] && mount -t hugetlbfs -o pagesize=2M none "$huge" 2>/dev/null; then
  before=$(cat "$pages")
  echo $((before + 16)) >"$pages"
  if [ "$(cat "$pages")" -lt $((before + 16)) ]; then
    echo "SKIPPED: hugetlbfs kill loop: 16 huge pages could not be reserved"
  else
    names+=("native hugetlbfs")
    media+=("${names[3]}=$huge")
  fi
else
  echo "SKIPPED: hugetlbfs kill loop: only root can mount and reserve huge pages"
fi

"$program" "$cycles" "$seed" "${media[@]}"
{
  printf '{"cycles": {'
  separator=
  for name in "${names[@]}"; do
    printf '%s"%s": %s' "$separator" "$name" "$cycles"
    separator=', '
  done
  printf '}, "losses": 0}\n'
} >"$proof"
