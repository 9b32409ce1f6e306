# The guest's media, one function each: a fresh one is made, one that is there again is found.
# Each sets REGION, the path of lckguest's region. Sourced by init, which sets $age.

loaded() {
  for module in "$@"; do
    modprobe "$module" || return
  done
}

# Devices come when udev would see them: a little later.
there() {
  for _ in $(seq 200); do
    [ -e "$1" ] && return
    sleep 0.05
  done
  echo "FAILED $1 does not come"
  return 1
}

fresh() { [ "$age" = fresh ]; }

namespace() { # mode
  fresh || return 0
  ndctl create-namespace -f -e namespace0.0 -m "$1" -M mem -a 2M >/dev/null
}

filesystem() { # type device options
  loaded "$1" 2>/dev/null # ext4 is part of the cloud kernel
  if fresh; then
    case $1 in
    ext4) mkfs.ext4 -q -F -b 4096 -E lazy_itable_init=0 "$2" ;;
    xfs) mkfs.xfs -q -f -m reflink=0 "$2" ;;
    esac || return
  fi
  mkdir -p /mnt
  # Neither journal nor write-back saves by its own timer what nobody synced.
  echo 0 >/proc/sys/vm/dirty_writeback_centisecs
  case $1 in
  ext4) mount -t ext4 -o "$3,commit=3600" "$2" /mnt ;;
  xfs) mount -t xfs -o "$3" "$2" /mnt && echo 720000 >/proc/sys/fs/xfs/xfssyncd_centisecs ;;
  esac || return
  REGION=/mnt/region
}

nvdimm() { # mode
  loaded nfit nd_pmem dax_pmem device_dax && namespace "$1"
}

fsdax_ext4() { nvdimm fsdax && there /dev/pmem0 && filesystem ext4 /dev/pmem0 dax=always; }
fsdax_xfs() { nvdimm fsdax && there /dev/pmem0 && filesystem xfs /dev/pmem0 dax=always; }
file_ext4() { nvdimm fsdax && there /dev/pmem0 && filesystem ext4 /dev/pmem0 dax=never; }

devdax() {
  nvdimm devdax && there /dev/dax0.0 || return
  REGION=/dev/dax0.0
}

virtio_ext4() {
  loaded virtio_pci virtio_pmem nd_pmem && there /dev/pmem0 &&
    filesystem ext4 /dev/pmem0 dax=always
}

# What the cxl tool would do; regions do not outlive a boot, what lies in them does.
cxl_region() {
  loaded cxl_acpi cxl_pci cxl_mem cxl_pmem cxl_port nd_pmem dax_pmem device_dax || return
  devices=/sys/bus/cxl/devices
  there $devices/mem0 && there $devices/decoder0.0/create_pmem_region || return
  for _ in $(seq 200); do
    endpoint=$(grep -ls endpoint $devices/decoder*/devtype | head -1)
    [ -n "$endpoint" ] && break
    sleep 0.05
  done
  endpoint=$(basename "$(dirname "$endpoint")")
  size=$(cat $devices/mem0/pmem/size)
  region=$(cat $devices/decoder0.0/create_pmem_region)
  echo "$region" >$devices/decoder0.0/create_pmem_region
  echo 256 >"$devices/$region/interleave_granularity"
  echo 1 >"$devices/$region/interleave_ways"
  echo 11111111-2222-3333-4444-555555555555 >"$devices/$region/uuid"
  echo "$size" >"$devices/$region/size" || return
  echo pmem >"$devices/$endpoint/mode" || return
  echo "$size" >"$devices/$endpoint/dpa_size" || return
  echo "$endpoint" >"$devices/$region/target0" || return
  echo 1 >"$devices/$region/commit" || return
  echo "$region" >/sys/bus/cxl/drivers/cxl_region/bind || return
  there /sys/bus/nd/devices/region0
}

cxl_namespace() { # mode
  cxl_region || return
  fresh || return 0
  ndctl create-namespace -r region0 -m "$1" -M mem -a 2M >/dev/null
}

cxl_ext4() { cxl_namespace fsdax && there /dev/pmem0 && filesystem ext4 /dev/pmem0 dax=always; }

cxl_node() {
  cxl_namespace devdax && there /dev/dax0.0 && loaded kmem &&
    daxctl reconfigure-device -m system-ram dax0.0 >/dev/null || return
  grep MemTotal /sys/devices/system/node/node1/meminfo || return
  REGION=/dev/shm/region
}

# The host's root, read-only, with this machine's own devices and memory in it.
hosted_ext4() {
  loaded crc32c_generic virtio_pci 9pnet_virtio 9p && fsdax_ext4 || return
  mkdir -p /host
  mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=524288 host /host || return
  for place in dev proc sys mnt; do
    mount --bind /$place /host/$place || return
  done
}

# Fails every write from the moment on when a step says so.
flakey_ext4() {
  loaded dm_mod dm_flakey && nvdimm fsdax && there /dev/pmem0 || return
  sectors=$(blockdev --getsz /dev/pmem0)
  dmsetup create --noudevsync flakey --table "0 $sectors flakey /dev/pmem0 0 3600 0" &&
    there /dev/dm-0 && filesystem ext4 /dev/dm-0 dax=never
}

# Steps besides lckguest's own. Arguments: a word, the region, and more.

# Stay, and wait for the plug to be pulled.
stay() {
  echo STAYS
  sleep 3600
}

# Commit, do something right after one commit, and pass on all that was said.
upon() { # commits action region options...
  commits=$1 action=$2
  shift 2
  mkfifo /tmp/said
  lckguest write "$@" >/tmp/said &
  writer=$!
  while read -r line; do
    echo "$line"
    [ "$line" = "COMMITTED $commits" ] && $action
  done </tmp/said
  wait $writer
}

kill_writer() { kill -9 "$writer"; }

# The process dies, the machine lives on.
interrupted() { # commits region options...
  wanted=$1
  shift
  upon "$wanted" kill_writer "$@"
}

# The real package, with the host's Python.
hosted() { # write|verify region root python library
  chroot /host /usr/bin/env -i PATH=/usr/bin:/bin PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="$3" \
    LIGHTCK_NATIVE="$5" OMP_NUM_THREADS=1 "$4" -m tests.guest.numpy_region "$1" "$2"
}

# A media error under a part of the newest snapshot: loads from there fault from now on.
poisoned() { # part region
  sector=$(lckguest sector "$2" "$1" | sed -n 's/^SECTOR //p')
  umount /mnt && echo "$sector 8" >/sys/block/pmem0/badblocks || return
  echo "POISONED $1 $(cat /sys/block/pmem0/badblocks)"
  mount -t ext4 -o dax=always /dev/pmem0 /mnt
}

# The medium fails under a process that commits.
failing() { # commits region
  upon "$1" fail_writes "$2"
}

fail_writes() {
  dmsetup suspend --noudevsync flakey &&
    dmsetup load flakey --table "0 $sectors flakey /dev/pmem0 0 0 3600 1 error_writes" &&
    dmsetup resume --noudevsync flakey && echo FAILING
}
