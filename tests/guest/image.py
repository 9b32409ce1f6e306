"""The guest's kernel and first file system: tools, modules of an unpacked kernel, lckguest."""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
MODULES = {
    "cloud": (
        *("nfit", "nd_pmem", "dax_pmem", "device_dax", "kmem"),
        *("cxl_acpi", "cxl_pci", "cxl_mem", "cxl_pmem", "cxl_port"),
        *("xfs", "ext4", "virtio_pci", "virtio_pmem", "dm_mod", "dm_flakey"),
    ),
    "full": ("nfit", "nd_pmem", "dax_pmem", "device_dax", "ext4", "crc32c_generic", "virtio_pci")
    + ("9pnet_virtio", "9p"),
}
TOOLS = ("mkfs.ext4", "mkfs.xfs", "ndctl", "daxctl", "dmsetup")
_PATH = os.environ.get("PATH", "") + ":/sbin:/usr/sbin"


@dataclass(frozen=True)
class Image:
    """QEMU boots this image."""

    kernel: Path
    initramfs: Path
    version: str


def build(unpacked: Path, flavour: str, programs: list[Path], folder: Path) -> Image:
    """Make the initial file system in `folder`.

    Args:
        unpacked: where install.sh unpacked the kernel's package.
        flavour: `cloud` or `full`; decides which modules there are.
        programs: executables for /bin.
        folder: receives the result.
    """
    unpacked = unpacked.resolve()
    version = next((unpacked / "lib/modules").iterdir()).name
    with tempfile.TemporaryDirectory(dir=folder) as name:
        root = Path(name)
        for place in ("bin", "sbin", "dev", "proc", "sys", "tmp", "mnt", "etc", "run"):
            (root / place).mkdir()
        _add_tools(root)
        _add_modules(root, unpacked, version, MODULES[flavour])
        for program in programs:
            shutil.copy2(program, root / "bin" / program.name)
        shutil.copy2(HERE / "media.sh", root)
        shutil.copy2(HERE / "init", root)
        (root / "init").chmod(0o755)
        initramfs = folder / f"initramfs-{flavour}.gz"
        _pack(root, initramfs)
    return Image(unpacked / f"boot/vmlinuz-{version}", initramfs, version)


def _add_tools(root: Path) -> None:
    busybox = shutil.which("busybox", path=_PATH)
    assert busybox is not None, "install.sh has looked for it"
    shutil.copy2(busybox, root / "bin/busybox")
    applets = subprocess.run([busybox, "--list"], check=True, capture_output=True, text=True)
    for applet in applets.stdout.split():
        if applet != "busybox":
            (root / "bin" / applet).symlink_to("busybox")
    (root / "sbin/modprobe").symlink_to("../bin/busybox")  # where the kernel itself calls it
    for tool in TOOLS:
        found = shutil.which(tool, path=_PATH)
        assert found is not None, "install.sh has looked for it"
        place = root / "sbin" / tool
        place.unlink(missing_ok=True)
        shutil.copy2(os.path.realpath(found), place)
        (root / "bin" / tool).unlink(missing_ok=True)  # of busybox, which knows less
        _add_libraries(root, found)


def _add_libraries(root: Path, program: str) -> None:
    listed = subprocess.run(["ldd", program], check=True, capture_output=True, text=True).stdout
    for word in listed.split():
        if not word.startswith("/"):
            continue
        place = root / word.lstrip("/")
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(os.path.realpath(word), place)


def _add_modules(root: Path, unpacked: Path, version: str, names: tuple[str, ...]) -> None:
    """Those named, and what they need; others are built into the kernel."""
    modprobe = shutil.which("modprobe", path=_PATH)
    assert modprobe is not None, "install.sh has looked for it"
    options = ["-C", "/dev/null", "-d", str(unpacked), "-S", version, "--show-depends"]
    for name in names:
        shown = subprocess.run([modprobe, *options, name], capture_output=True, text=True)
        if shown.returncode:
            raise RuntimeError(f"kernel {version} has no module {name}: {shown.stderr.strip()}")
        for line in shown.stdout.splitlines():
            kind, _, rest = line.partition(" ")
            if kind != "insmod":
                continue
            file = Path(rest.split()[0])
            place = root / file.relative_to(unpacked)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, place)
    lists = Path("lib/modules") / version
    for name in ("modules.order", "modules.builtin"):
        shutil.copy2(unpacked / lists / name, root / lists / name)
    command = ["depmod", "-b", str(root), version]
    subprocess.run(command, check=True, env={"PATH": _PATH}, capture_output=True)


def _pack(root: Path, to: Path) -> None:
    names = b"\0".join(str(p.relative_to(root)).encode() for p in sorted(root.rglob("*")))
    archive = subprocess.run(
        ["cpio", "--quiet", "--null", "-o", "-H", "newc"],
        cwd=root,
        input=names,
        capture_output=True,
        check=True,
    ).stdout
    draft = to.with_suffix(".draft")
    with gzip.open(draft, "wb", compresslevel=1) as file:
        file.write(archive)
    os.replace(draft, to)
