"""Probes of a made-up machine: each symptom rises and falls, and what cannot be read says so."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightck.health import (
    Drives,
    KernelLog,
    MemoryPressure,
    Nvml,
    UnavailableError,
    dram,
    links,
    probes,
)
from lightck.policy.symptoms import SYMPTOMS
from support.machine import Disk, Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


# ---- links and DRAM ----------------------------------------------------------------------------


def test_a_link_that_goes_down_is_seen_once_for_each_device(machine: Machine) -> None:
    port = "sys/class/infiniband/mlx5_0/ports/1/counters"
    for number, path in enumerate(
        (
            "sys/class/net/eth0/carrier_down_count",
            f"{port}/link_downed",
            f"{port}/link_error_recovery",
        )
    ):
        machine.put(path, number)
    machine.put("sys/class/net/eth0/device/vendor", "0x15b3")
    probe = links(machine.root, machine.clock)
    assert probe.read() == {}, "what has been before is no growth"
    assert probe.read() == {}
    machine.put("sys/class/net/eth0/carrier_down_count", 1)
    assert probe.read() == {"link": 1}
    assert probe.detail == "/sys/class/net/eth0/carrier_down_count"
    assert probe.read() == {}
    machine.put(f"{port}/link_downed", 9)
    machine.put(f"{port}/link_error_recovery", 9)
    assert probe.read() == {"link": 1}, "two counters of one port"
    machine.put(f"{port}/link_downed", 0)
    assert probe.read() == {}, "a driver was loaded again"
    machine.put(f"{port}/link_downed", 1)
    assert probe.read() == {"link": 1}


def test_virtual_interfaces_come_and_go(machine: Machine) -> None:
    machine.put("sys/class/net/veth7/carrier_down_count", 0)
    with pytest.raises(UnavailableError, match="none of these is there"):
        links(machine.root).read()


def test_an_error_of_dram_that_is_not_corrected_is_seen(machine: Machine) -> None:
    machine.put("sys/devices/system/edac/mc/mc0/ue_count", 3)
    machine.put("sys/devices/system/edac/mc/mc0/ce_count", 1000)
    probe = dram(machine.root, machine.clock)
    assert probe.read() == {}
    machine.put("sys/devices/system/edac/mc/mc0/ue_count", 4)
    assert probe.read() == {"dram": 1}
    assert probe.read() == {}


def test_corrected_errors_count_from_a_hundred_an_hour(machine: Machine) -> None:
    path = "sys/devices/system/edac/mc/mc0/ce_count"
    machine.put(path, 1000)
    probe = dram(machine.root, machine.clock)
    for hour in range(4):  # 90 an hour, for hours
        machine.now_s = 3600.0 * hour
        machine.put(path, 1000 + 90 * hour)
        assert probe.read() == {}
    machine.now_s += 1000
    machine.put(path, 1000 + 90 * 3 + 100)
    assert probe.read() == {"dram_corrected": 1}
    assert probe.read() == {}


# ---- memory ------------------------------------------------------------------------------------


def pressure(machine: Machine, full: float) -> None:
    machine.put(
        "proc/pressure/memory",
        f"some avg10=99.00 avg60=0.00 avg300=0.00 total=7\n"
        f"full avg10={full:.2f} avg60=0.00 avg300=0.00 total=7",
    )


def test_memory_counts_while_all_tasks_wait_for_it(machine: Machine) -> None:
    probe = MemoryPressure(machine.root)
    for full, found in ((0.0, {}), (9.99, {}), (10.0, {"memory": 1.0}), (0.0, {})):
        pressure(machine, full)
        assert probe.read() == found
    assert probe.detail == ""


def test_a_full_cgroup_counts_without_files_that_can_be_dropped(machine: Machine) -> None:
    machine.put("proc/self/cgroup", "0::/job/7")
    machine.put("sys/fs/cgroup/job/7/memory.max", 1000)
    machine.put("sys/fs/cgroup/job/7/memory.current", 990)
    machine.put("sys/fs/cgroup/job/7/memory.stat", "anon 400\ninactive_file 500\nother x y")
    probe = MemoryPressure(machine.root)
    assert probe.read() == {}, "half of it is the page cache"
    machine.put("sys/fs/cgroup/job/7/memory.stat", "anon 950\ninactive_file 10")
    assert probe.read() == {"memory": 1.0}
    assert "98%" in probe.detail
    machine.put("sys/fs/cgroup/job/7/memory.max", "max")
    pressure(machine, 0)
    assert probe.read() == {}


def test_a_process_that_the_kernel_kills_for_memory_is_seen(machine: Machine) -> None:
    machine.put("proc/vmstat", "nr_free_pages 7\noom_kill 2")
    probe = MemoryPressure(machine.root)
    assert probe.read() == {}
    machine.put("proc/vmstat", "nr_free_pages 7\noom_kill 3")
    assert probe.read() == {"oom_kill": 1.0}
    assert probe.read() == {}
    machine.put("sys/fs/cgroup/memory.events", "low 0\noom_kill 3")
    machine.put("proc/vmstat", "oom_kill 9")
    assert probe.read() == {}, "another container's"


# ---- the kernel's log --------------------------------------------------------------------------


def test_an_xid_that_asks_for_a_reset_is_seen_once(machine: Machine) -> None:
    line = "4,{},100,-;NVRM: Xid (PCI:0000:{}:00): {}, pid=7, GPU has fallen off the bus.\n"
    log = machine.put("dev/kmsg", line.format(1, "3b", 79))
    probe = KernelLog(machine.root)
    assert probe.read() == {}, "what was there before the start is another life's"
    with log.open("a") as more:
        more.write(
            "6,2,101,-;NVRM: loading\n" + line.format(3, "3b", 31) + line.format(3, "3b", 63)
        )
    assert probe.read() == {}, "faults of applications, and what NVIDIA says to ignore"
    with log.open("a") as more:
        more.write(line.format(4, "3b", 48) + line.format(5, "3b", 95) + line.format(6, "af", 119))
    assert probe.read() == {"gpu_error": 2}
    assert probe.detail == "GPU 0000:3b:00: Xid 48, GPU 0000:3b:00: Xid 95, GPU 0000:af:00: Xid 119"
    assert probe.read() == {}


def test_a_log_that_may_not_be_read_says_so(machine: Machine) -> None:
    with pytest.raises(UnavailableError, match="dmesg_restrict"):
        KernelLog(machine.root).read()


# ---- GPUs --------------------------------------------------------------------------------------


class NvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value


class FakeNvml(SimpleNamespace):
    """A driver's library with two GPUs: what each says is in `gpus`."""

    NVMLError = NvmlError
    NVML_SUCCESS, NVML_ERROR_NOT_SUPPORTED = 0, 3
    NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED = 15, 16
    NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0

    def __init__(self) -> None:
        names = ("GPU-aa", "GPU-bb")
        self.gpus = {name: {"action": 0, "ecc": 0, "rows": 0, "error": 0} for name in names}

    def nvmlInit(self) -> None: ...  # noqa: N802

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return [*self.gpus][index]

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:  # noqa: N802
        return name

    def nvmlDeviceGetFieldValues(self, gpu: str, fields: list[int]) -> Any:  # noqa: N802
        assert fields == [230]
        if self.gpus[gpu]["error"]:
            raise NvmlError(self.gpus[gpu]["error"])
        action = self.gpus[gpu]["action"]
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=action))]

    def nvmlDeviceGetTotalEccErrors(self, gpu: str, kind: int, since: int) -> int:  # noqa: N802
        assert (kind, since) == (1, 0)
        return self.gpus[gpu]["ecc"]

    def nvmlDeviceGetRemappedRows(self, gpu: str) -> tuple[int, int, int, int]:  # noqa: N802
        if self.gpus[gpu]["rows"] < 0:
            raise NvmlError(self.NVML_ERROR_NOT_SUPPORTED)
        return 7, self.gpus[gpu]["rows"], 0, 0


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_what_the_driver_asks_for_counts_while_it_does(nvml: FakeNvml) -> None:
    probe = Nvml({})
    assert probe.read() == {}
    nvml.gpus["GPU-aa"]["action"] = 1
    nvml.gpus["GPU-bb"]["error"] = nvml.NVML_ERROR_GPU_IS_LOST
    assert probe.read() == {"gpu_action": 2}
    nvml.gpus["GPU-aa"]["action"] = 0
    assert probe.read() == {"gpu_action": 1}


def test_errors_of_a_gpu_that_were_not_corrected_are_seen_when_they_grow(nvml: FakeNvml) -> None:
    nvml.gpus["GPU-aa"]["ecc"] = 5
    nvml.gpus["GPU-bb"]["rows"] = -1  # remaps none
    probe = Nvml({})
    assert probe.read() == {}
    nvml.gpus["GPU-aa"]["rows"] = 1
    nvml.gpus["GPU-bb"]["ecc"] = 1
    assert probe.read() == {"gpu_error": 2}
    assert probe.read() == {}


@pytest.mark.parametrize(
    ("environment", "seen"),
    [
        ({}, 2),
        ({"CUDA_VISIBLE_DEVICES": "1"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "GPU-bb"}, 1),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"LOCAL_RANK": "1"}, 1),
        ({"LOCAL_RANK": "0"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "1", "LOCAL_RANK": "3"}, 1),
    ],
)
def test_a_rank_reads_its_own_gpus(nvml: FakeNvml, environment: dict[str, str], seen: int) -> None:
    for gpu in nvml.gpus.values():
        gpu["action"] = 2
    assert Nvml(environment).read().get("gpu_action", 0) == seen


def test_an_error_of_the_library_is_no_symptom(nvml: FakeNvml) -> None:
    nvml.gpus["GPU-aa"]["error"] = 999
    with pytest.raises(NvmlError):
        Nvml({}).read()


def test_without_the_library_there_is_nothing_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(UnavailableError, match="pip install"):
        Nvml({}).read()


# ---- drives ------------------------------------------------------------------------------------


def test_sectors_that_are_both_reallocated_and_pending_are_a_symptom(machine: Machine) -> None:
    disk = Disk(machine)
    probe = disk.probe()
    for found in ((0, 0), (8, 0), (0, 8)):
        disk.sectors(*found)
        assert probe.read() == {}
    disk.sectors(8, 2)
    assert probe.read() == {"drive": 1}
    assert probe.detail == "sda: 8 reallocated and 2 pending sectors"
    assert (machine.root / "asked").read_text().splitlines()[0] == "-j -H -A /dev/sda"


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ('{"smartctl": {}, "smart_status": {"passed": false}}', "its own verdict"),
        (
            '{"smartctl": {}, "nvme_smart_health_information_log": {"critical_warning": 5}}',
            "critical warning 0x5",
        ),
    ],
)
def test_what_a_drive_says_of_itself_is_a_symptom(machine: Machine, told: str, why: str) -> None:
    disk = Disk(machine, "nvme0n1")
    disk.says(told)
    probe = disk.probe()
    assert probe.read() == {"drive": 1}
    assert why in probe.detail


def test_a_hot_drive_is_none_that_fails(machine: Machine) -> None:
    disk = Disk(machine, "nvme0n1")
    disk.says('{"smartctl": {}, "nvme_smart_health_information_log": {"critical_warning": 2}}')
    assert disk.probe().read() == {}


def test_bad_blocks_and_lost_drives_are_symptoms(machine: Machine) -> None:
    disk = Disk(machine, "md0", partition=False)
    for part in ("sdb", "pmem0"):
        (disk.folder.parent / part).mkdir()
        (disk.folder / "slaves").mkdir(exist_ok=True)
        (disk.folder / "slaves" / part).symlink_to(disk.folder.parent / part)
    machine.put("sys/devices/block/md0/md/degraded", 0)
    bad = machine.put("sys/devices/block/pmem0/badblocks", "")
    probe = disk.probe()
    assert probe.read() == {}
    bad.write_text("1024 8\n")
    machine.put("sys/devices/block/md0/md/degraded", 1)
    assert probe.read() == {"drive": 2}
    assert probe.detail == "md0: the array lacks 1 drives; pmem0: bad blocks"


def test_a_drive_that_may_not_be_asked_says_why(machine: Machine) -> None:
    disk = Disk(machine)
    disk.says('{"smartctl": {"messages": [{"string": "open device: Permission denied"}]}}')
    probe = disk.probe()
    assert probe.read() == {}
    assert probe.lacks == "open device: Permission denied"


@pytest.mark.parametrize("text", ["", "not JSON", "[]", '"smartctl"', '{"smartctl": 7}'])
def test_a_program_that_gives_no_answer_of_smartctls_is_an_error(
    machine: Machine, text: str
) -> None:
    disk = Disk(machine)
    disk.says(text)
    with pytest.raises(Exception, match="gave no JSON of smartctl's"):
        disk.probe().read()


def test_a_region_in_memory_has_no_drive(machine: Machine, region_dir: Path) -> None:
    with pytest.raises(UnavailableError, match="no block device is under"):
        Drives(region_dir, machine.root).read()
    with pytest.raises(UnavailableError, match="No such file"):
        Drives(region_dir / "gone", machine.root).read()


# ---- all of them -------------------------------------------------------------------------------


def test_an_empty_machine_has_nothing_to_read(machine: Machine) -> None:
    for probe in probes(machine.root, machine.root):
        if not isinstance(probe, Nvml):  # it has no files
            with pytest.raises(UnavailableError):
                probe.read()


def test_every_symptom_that_a_probe_may_see_is_in_the_table(machine: Machine) -> None:
    seen = {name for probe in probes(machine.root) for name in probe.symptoms}
    assert seen | {"rebalance"} == set(SYMPTOMS)


def test_this_machine_can_be_read(machine: Machine) -> None:
    for probe in probes(machine.root):
        try:
            assert probe.read() is not None
        except UnavailableError as why:
            assert str(why)
