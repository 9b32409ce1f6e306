"""A region that is damaged, foreign or of another model: a typed error; nothing is lost."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import lightck
from lightck.region.native_region import crc32c
from support.loops import Loop, adam_loop, attach, mlp, of_live, restored, still_there, train

VERSION_AT, CRC_AT, COPY_AT = 8, 956, (0, 4096)  # of a superblock; a test compares with format.h


def uses(loop_of: Callable[[], Loop] = adam_loop) -> list[Callable[[Path], object]]:
    def use_attach(path: Path) -> object:
        return attach(path, loop_of(), overwrite=True)

    def use_restore(path: Path) -> object:
        return lightck.restore(loop_of().model, None, path)

    return [use_attach, use_restore, lightck.load, lightck.snapshots]


use_it = pytest.mark.parametrize("use", uses(), ids=lambda f: f.__name__)


# ---- Not a region, or not a whole one -----------------------------------------------------------


def set_version(file: Path, version: int) -> None:
    """Write it in both superblocks, with good checksums: as another release would have done."""
    raw = bytearray(file.read_bytes()[:8192])
    for copy in COPY_AT:
        struct.pack_into("<I", raw, copy + VERSION_AT, version)
        struct.pack_into("<I", raw, copy + CRC_AT, crc32c(bytes(raw[copy : copy + CRC_AT])))
    with file.open("r+b") as region:
        region.write(raw)


@use_it
@pytest.mark.parametrize("version", [0, 1, 3, 99])
def test_another_format_version_is_named_with_the_one_this_release_reads(
    elsewhere: tuple[Path, Loop], use: Callable[[Path], object], version: int
) -> None:
    file = elsewhere[0] / "region-00000.lck"
    set_version(file, version)
    content = file.read_bytes()
    with pytest.raises(
        lightck.RegionFormatError, match=rf"version {version}, expected 2: .*lightck rm"
    ):
        use(elsewhere[0])
    assert file.read_bytes() == content, "a region that nobody could read was changed"
    set_version(file, 2)
    still_there(elsewhere)


@use_it
@pytest.mark.parametrize("left", [0, 1, 4095, 4096, 8192, 200_000, -1])
def test_a_truncated_region_is_refused_with_its_sizes(
    elsewhere: tuple[Path, Loop], use: Callable[[Path], object], left: int
) -> None:
    file = elsewhere[0] / "region-00000.lck"
    content = file.read_bytes()
    length = len(content) - 1 if left < 0 else left
    os.truncate(file, length)
    with pytest.raises(lightck.RegionFormatError, match=rf"\b{length}\b") as caught:
        use(elsewhere[0])
    if length >= 8192:
        assert str(len(content)) in str(caught.value)
    assert file.stat().st_size == length
    file.write_bytes(content)
    still_there(elsewhere)


@use_it
@pytest.mark.parametrize("content", [b"\0" * 8192, b"PK\3\4" * 4096, b"\xff" * (1 << 21)])
def test_a_file_that_is_no_region_is_refused_and_left_alone(
    run_dir: Path, use: Callable[[Path], object], content: bytes
) -> None:
    run_dir.mkdir(0o700)
    file = run_dir / "region-00000.lck"
    file.write_bytes(content)
    with pytest.raises((lightck.RegionFormatError, lightck.CorruptSnapshotError)):
        use(run_dir)
    assert file.read_bytes() == content


def test_a_step_that_is_not_there_is_named_with_those_that_are(
    elsewhere: tuple[Path, Loop],
) -> None:
    loop = adam_loop()
    before = of_live(loop.model, loop.optimizers)
    with pytest.raises(lightck.NoSnapshotError, match=r"wanted: 7; steps there: \[2, 3\]"):
        lightck.restore(loop.model, list(loop.optimizers), elsewhere[0], step=7)
    with pytest.raises(lightck.NoSnapshotError, match=r"wanted: 7; steps there: \[2, 3\]"):
        lightck.load(elsewhere[0], 7)
    assert of_live(loop.model, loop.optimizers) == before


def test_nothing_at_all_is_none_and_never_an_error(run_dir: Path) -> None:
    loop = adam_loop()
    assert restored(run_dir)[0] is None
    run_dir.mkdir(0o700)
    assert restored(run_dir)[0] is None
    attach(run_dir, loop).detach()  # a region without a snapshot
    assert restored(run_dir)[0] is None
    assert lightck.snapshots(run_dir).num_rows == 0
    with pytest.raises(lightck.NoSnapshotError):
        lightck.load(run_dir)


# ---- Of another model ---------------------------------------------------------------------------


class Other(nn.Sequential):
    """The model is as the first one, but one layer is wider, one is gone and one is new."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("0", nn.Linear(16, 16))
        self.add_module("1", nn.Linear(16, 24))
        self.add_module("head", nn.Linear(24, 2))


def test_differences_of_another_model_are_listed_and_nothing_is_changed(
    run_dir: Path,
) -> None:
    model = mlp(16, 3)
    loop = Loop(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), width=16)
    train(run_dir, loop, 2)
    other = Other()
    before = of_live(other, [])
    with pytest.raises(lightck.RestoreMismatchError) as caught:
        lightck.restore(other, None, run_dir)
    error = caught.value
    assert set(error.missing) == {"model/head.weight", "model/head.bias"}
    assert set(error.unexpected) == {"model/2.weight", "model/2.bias"}
    assert error.different == {
        "model/1.weight": "saved float32[16, 16], live float32[24, 16]",
        "model/1.bias": "saved float32[16], live float32[24]",
    }
    for part in (*error.missing, *error.unexpected, *error.different.values(), "strict=False"):
        assert part in str(error)
    assert of_live(other, []) == before

    info = lightck.restore(other, None, run_dir, strict=False)
    assert info is not None and info.step == 2
    state = {"optim/0/1.weight/momentum_buffer", "optim/0/1.bias/momentum_buffer"}
    assert set(info.skipped) == {*error.missing, *error.unexpected, *error.different, *state}
    after, seen = of_live(other, []), loop.seen[2]
    for name in ("model/0.weight", "model/0.bias"):
        assert after[name] == seen[name]
    for name in (*error.missing, *error.different):
        assert after[name] == before[name]
    loop.check(run_dir, [1, 2])


def test_another_dtype_is_a_difference(run_dir: Path) -> None:
    loop = adam_loop()
    train(run_dir, loop, 1)
    halved = mlp(16, 2).bfloat16()
    with pytest.raises(
        lightck.RestoreMismatchError, match=r"saved float32\[16, 16\], live bfloat16\[16, 16\]"
    ):
        lightck.restore(halved, None, run_dir)
    info = lightck.restore(halved, None, run_dir, strict=False)
    assert info is not None
    kinds = [name.rpartition("/")[2] for name in info.skipped if name.startswith("optim/")]
    assert sorted(kinds) == sorted(4 * ["exp_avg", "exp_avg_sq", "step"])
    assert len(info.skipped) == 4 + len(kinds)


def test_an_optimizer_of_another_kind_or_over_other_parameters_is_a_difference(
    run_dir: Path,
) -> None:
    loop = adam_loop()
    train(run_dir, loop, 2)
    model = mlp(16, 2)
    for optimizer in (
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.optim.AdamW(model[0].parameters(), lr=0.1),
    ):
        with pytest.raises(lightck.RestoreMismatchError, match=type(optimizer).__name__) as caught:
            lightck.restore(model, optimizer, run_dir)
        assert len(caught.value.missing) == 1
        info = lightck.restore(model, optimizer, run_dir, strict=False)
        assert info is not None and len(info.skipped) == 1
        assert {k: v for k, v in loop.seen[2].items() if k.startswith("model/")} == of_live(
            model, []
        )


def test_extras_that_the_snapshot_lacks_are_a_difference_and_those_left_over_are_told(
    run_dir: Path,
) -> None:
    loop = adam_loop()
    train(run_dir, loop, 1, extras={"kept": {"a": 1}, "dropped": {"b": 2}})
    kept: dict[str, int] = {}
    with pytest.raises(lightck.RestoreMismatchError, match="extras/new"):
        lightck.restore(loop.model, None, run_dir, extras={"kept": kept, "new": {}})
    assert kept == {}
    info = lightck.restore(
        loop.model, None, run_dir, extras={"kept": kept, "new": {}}, strict=False
    )
    assert info is not None
    assert kept == {"a": 1}
    assert info.leftover == ("dropped",)
    assert set(info.skipped) == {"extras/new"}
