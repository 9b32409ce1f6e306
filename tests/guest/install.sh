#!/usr/bin/env bash
# Bring what `make pmem-guest` needs: QEMU and tools by apt where they are missing, and a kernel,
# which is decode_entry into a folder and never installed. Usage: install.sh FOLDER cloud|full
# Exits with 77 and says why where that is not possible.
set -euo pipefail
folder=$1 flavour=$2
tools=(qemu-system-x86_64 busybox ndctl daxctl mkfs.ext4 mkfs.xfs cpio depmod dmsetup setpriv)
packages=(qemu-system-x86 ndctl daxctl busybox-static e2fsprogs xfsprogs cpio kmod dmsetup)
export PATH=$PATH:/sbin:/usr/sbin DEBIAN_FRONTEND=noninteractive

skip() { echo "SKIPPED: $*"; exit 77; }

missing() {
  for tool in "${tools[@]}"; do
    command -v "$tool" >/dev/null || echo "$tool"
  done
}

[ "$(uname -m)" = x86_64 ] || skip "the guest's devices are emulated for x86-64, this is $(uname -m)"
if [ -n "$(missing)" ]; then
  [ "$(id -u)" = 0 ] || skip "not root, and not installed:" $(missing)
  command -v apt-get >/dev/null || skip "no apt-get, and not installed:" $(missing)
  timeout 150 apt-get install -y -q --no-install-recommends "${packages[@]}" >/dev/null 2>&1 ||
    { timeout 60 apt-get update -q >/dev/null 2>&1 &&
      timeout 150 apt-get install -y -q --no-install-recommends "${packages[@]}" >/dev/null; } ||
    skip "apt-get could not install" $(missing)
  [ -z "$(missing)" ] || skip "still not there after apt-get install:" $(missing)
fi
ldd "$(command -v busybox)" >/dev/null 2>&1 && skip "busybox is not a static one (busybox-static)"

kernel=$folder/kernel-$flavour
[ -e "$kernel/ready" ] && exit 0
[ "$flavour" = cloud ] && meta=linux-image-cloud-amd64 || meta=linux-image-amd64
depends=$(apt-cache depends "$meta" 2>/dev/null || true)
package=$(sed -n 's/.*Depends: \(linux-image-[0-9]\S*\)/\1/p' <<<"$depends")
[ -n "$package" ] || skip "apt knows no kernel package $meta"
rm -rf "$kernel" && mkdir -p "$kernel/deb"
(cd "$kernel/deb" && timeout 150 apt-get download -q "$package" >/dev/null 2>&1) ||
  skip "apt-get could not download $package"
dpkg -x "$kernel"/deb/*.deb "$kernel"
rm -r "$kernel/deb"
depmod -b "$kernel" "$(ls "$kernel/lib/modules")"
touch "$kernel/ready"
