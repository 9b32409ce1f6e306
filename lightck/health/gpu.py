"""The probe of this rank's NVIDIA GPUs, by their driver's management library."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lightck.health.machine import Growth, MachineProbe
from lightck.health.monitor import UnavailableError


class Nvml(MachineProbe):
    """The driver's own view of the GPUs: that it wants a reset, and memory errors that grow.

    A rank under a launcher reads its own GPU, any other process all that it may see. A call may
    hang when a GPU is lost, and with it this probe's thread. Needs `nvidia-ml-py`.
    Source: https://docs.nvidia.com/deploy/nvml-api/.
    """

    name = "nvml"
    symptoms = ("gpu_action", "gpu_error")
    reads = "NVML: recovery action, uncorrected ECC errors, remapped rows"
    of_node = False

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """Prepare; the library is loaded at the first reading. The default is `os.environ`."""
        # Not as the default value, which help() would print with all its variables.
        self._environment = os.environ if environment is None else environment
        self._nvml: Any = None
        self._errors = Growth()

    def read(self) -> Mapping[str, float]:
        """See `Probe`."""
        nvml = self._library()
        actions, errors = [], dict[str, int]()
        for name, handle in self._devices(nvml):
            try:
                if self._action(nvml, handle):
                    actions.append(name)
                errors[name] = self._count(nvml, handle)
            except nvml.NVMLError as error:
                if error.value not in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
                    raise
                actions.append(name)
        grown = self._errors.grown(errors, 0.0)
        self.detail = ", ".join(
            [f"GPU {name}: its driver wants a reset" for name in actions]
            + [f"GPU {name}: errors of its memory that were not corrected" for name in grown]
        )
        counts = {"gpu_action": len(actions), "gpu_error": len(grown)}
        return {name: count for name, count in counts.items() if count}

    def _library(self) -> Any:
        if self._nvml is None:
            try:
                import pynvml
            except ModuleNotFoundError as error:
                raise UnavailableError(
                    "nvidia-ml-py is not installed: pip install 'lightck[health]'"
                ) from error
            try:
                pynvml.nvmlInit()
            except pynvml.NVMLError as error:
                raise UnavailableError(f"no NVIDIA driver answers: {error}") from error
            self._nvml = pynvml
        return self._nvml

    def _devices(self, nvml: Any) -> list[tuple[str, Any]]:
        visible = self._environment.get("CUDA_VISIBLE_DEVICES")
        names = [str(index) for index in range(nvml.nvmlDeviceGetCount())]
        if visible is not None:
            names = [each.strip() for each in visible.split(",") if each.strip()]
        local = self._environment.get("LOCAL_RANK", "")
        if local.isdigit() and names:
            names = [names[int(local) % len(names)]]
        return [
            (
                name,
                nvml.nvmlDeviceGetHandleByIndex(int(name))
                if name.isdigit()
                else nvml.nvmlDeviceGetHandleByUUID(name),
            )
            for name in names
        ]

    def _action(self, nvml: Any, handle: Any) -> bool:
        """Tell whether the driver asks for something; False where it is too old to say."""
        (field,) = nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
        return bool(field.nvmlReturn == nvml.NVML_SUCCESS and field.value.uiVal)

    def _count(self, nvml: Any, handle: Any) -> int:
        """Return the errors so far that were not corrected, and the rows they cost."""
        total = 0
        try:
            total += nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            )
            _, rows, _, failed = nvml.nvmlDeviceGetRemappedRows(handle)
            total += rows + failed
        except nvml.NVMLError as error:  # consumer GPUs have no ECC, older ones remap no rows
            if error.value != nvml.NVML_ERROR_NOT_SUPPORTED:
                raise
        return total
