"""A path that cannot, or must not, be used: a clear typed error; nothing is lost or changed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import lightck
from support import processes
from support.loops import Loop, adam_loop, mlp, of_live, of_stored, steps_at

NOBODY = 65534


def attach(path: Path, loop: Loop | None = None, **settings: object) -> lightck.Handle:
    loop = loop or adam_loop()
    return lightck.attach(loop.model, list(loop.optimizers), path, **settings)  # type: ignore[arg-type]


def restore(path: Path) -> lightck.RestoreInfo | None:
    loop = adam_loop()
    return lightck.restore(loop.model, list(loop.optimizers), path)


ENTRIES: list[Callable[[Path], object]] = [attach, restore, lightck.load, lightck.snapshots]
entry = pytest.mark.parametrize("use", ENTRIES, ids=lambda f: f.__name__)


@pytest.fixture
def trained(run_dir: Path) -> tuple[Path, Loop]:
    """A run of this process with snapshots of steps 2 and 3."""
    loop = adam_loop()
    with attach(run_dir, loop) as handle:
        for _ in range(3):
            loop.run(1)
            handle.wait()
        loop.note()
    return run_dir, loop


def still_there(trained: tuple[Path, Loop]) -> None:
    """Nothing was lost."""
    path, loop = trained
    loop.check(path, [2, 3])


# ---- What stands at the path --------------------------------------------------------------------


@entry
def test_a_missing_parent_is_named_and_not_made(
    run_dir: Path, use: Callable[[Path], object]
) -> None:
    with pytest.raises(lightck.RegionError, match=f"parent folder {run_dir} does not exist"):
        use(run_dir / "run")
    assert not run_dir.exists()


@entry
def test_a_file_in_the_folders_place_is_refused_and_left_alone(
    run_dir: Path, use: Callable[[Path], object]
) -> None:
    run_dir.write_text("a diary")
    with pytest.raises(lightck.RegionError, match=f"{run_dir} is a file .*expected a folder"):
        use(run_dir)
    assert run_dir.read_text() == "a diary"


@entry
def test_a_symlink_to_a_folder_is_refused(
    trained: tuple[Path, Loop], use: Callable[[Path], object]
) -> None:
    path, _ = trained
    link = path.with_name("link")
    link.symlink_to(path)
    with pytest.raises(lightck.RegionError, match=f"{link} is a symbolic link"):
        use(link)
    link.unlink()
    link.symlink_to(path.with_name("nowhere"))
    with pytest.raises(lightck.RegionError, match=f"{link} is a symbolic link"):
        use(link)
    assert not path.with_name("nowhere").exists()
    still_there(trained)


@entry
@pytest.mark.parametrize("dangling", [False, True])
def test_a_symlink_as_region_file_is_refused(
    trained: tuple[Path, Loop], use: Callable[[Path], object], dangling: bool
) -> None:
    path, _ = trained
    other = path.with_name("other")
    other.mkdir(0o700)
    (other / "region-00000.lck").symlink_to("gone" if dangling else path / "region-00000.lck")
    with pytest.raises(lightck.RegionError, match=r"region-00000.lck is a symbolic link"):
        use(other)
    assert not (other / "gone").exists()
    still_there(trained)


@entry
def test_a_folder_as_region_file_is_refused(run_dir: Path, use: Callable[[Path], object]) -> None:
    (run_dir / "region-00000.lck").mkdir(parents=True, mode=0o700)
    run_dir.chmod(0o700)
    with pytest.raises(lightck.RegionError, match=r"region-00000.lck"):
        use(run_dir)


@entry
def test_a_pipe_as_region_file_is_refused_and_not_waited_for(
    run_dir: Path, use: Callable[[Path], object]
) -> None:
    run_dir.mkdir(0o700)
    os.mkfifo(run_dir / "region-00000.lck")
    with pytest.raises(lightck.RegionError, match=r"region-00000.lck"):
        use(run_dir)


# ---- Whose it is --------------------------------------------------------------------------------


@entry
@pytest.mark.parametrize("which", ["folder", "region"])
@pytest.mark.parametrize("how", ["another user's", "writable by the group", "writable by all"])
def test_what_others_could_write_is_refused(
    trained: tuple[Path, Loop], use: Callable[[Path], object], which: str, how: str
) -> None:
    path, _ = trained
    victim = path if which == "folder" else path / "region-00000.lck"
    mode = victim.stat().st_mode & 0o777
    if how == "another user's":
        os.chown(victim, NOBODY, -1)
        message = f"{victim}: the {which} belongs to user {NOBODY}, this process is {os.geteuid()}"
    else:
        victim.chmod(mode | (0o020 if how == "writable by the group" else 0o002))
        message = f"{victim}: the {which} is writable by others"
    with pytest.raises(lightck.RegionError, match=message):
        use(path)
    os.chown(victim, os.geteuid(), -1)
    victim.chmod(mode)
    still_there(trained)


@pytest.fixture
def nobodys(region_dir: Path) -> Path:
    """A folder of a user without privileges."""
    folder = region_dir / "home"
    folder.mkdir()
    region_dir.chmod(0o755)
    os.chown(folder, NOBODY, NOBODY)
    return folder


def test_a_user_without_rights_to_the_parent_is_told(nobodys: Path) -> None:
    nobodys.chmod(0o500)
    with pytest.raises(lightck.RegionError, match="cannot make the folder: Permission denied"):
        processes.run(lambda: attach(nobodys / "run"), user=NOBODY)
    assert not list(nobodys.iterdir())


def test_a_user_without_rights_to_the_folder_is_told(nobodys: Path) -> None:
    nobodys.chmod(0o500)
    with pytest.raises(lightck.RegionError, match="cannot make a region: Permission denied"):
        processes.run(lambda: attach(nobodys), user=NOBODY)
    assert not list(nobodys.iterdir())


def train_as_nobody(path: Path) -> None:
    def train() -> None:
        loop = adam_loop()
        with attach(path, loop):
            loop.run(1)

    processes.run(train, user=NOBODY)


@entry
def test_a_region_that_may_not_be_read_is_no_empty_place(
    nobodys: Path, use: Callable[[Path], object]
) -> None:
    """`None` and `NoSnapshotError` would say that there is nothing; nobody can know that here."""
    train_as_nobody(nobodys / "run")
    (nobodys / "run" / "region-00000.lck").chmod(0)
    with pytest.raises(lightck.RegionError, match="region-00000.lck: cannot open: Permission"):
        processes.run(lambda: bool(use(nobodys / "run")), user=NOBODY)


@entry
@pytest.mark.parametrize("level", ["folder", "parent"])
def test_a_folder_that_may_not_be_entered_is_no_empty_place(
    nobodys: Path, use: Callable[[Path], object], level: str
) -> None:
    train_as_nobody(nobodys / "run")
    closed = nobodys / "run" if level == "folder" else nobodys
    closed.chmod(0)
    with pytest.raises(lightck.RegionError, match="Permission denied"):
        processes.run(lambda: bool(use(nobodys / "run")), user=NOBODY)


# ---- Mounts -------------------------------------------------------------------------------------


@pytest.fixture
def mount(region_dir: Path) -> Iterator[Callable[..., Path]]:
    """Mounts a tmpfs with options below the test's folder, and unmounts it afterwards."""
    mounted: list[Path] = []

    def make(options: str) -> Path:
        folder = region_dir / f"mount-{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"{options},mode=0700", "tmpfs", str(folder)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("SKIPPED: this user cannot mount a tmpfs here")
        mounted.append(folder)
        return folder

    yield make
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


def test_a_read_only_medium_is_readable_and_says_so_to_a_writer(
    mount: Callable[..., Path],
) -> None:
    medium = mount("size=64m")
    loop = adam_loop()
    with attach(medium / "run", loop):
        loop.run(2)
        loop.note()
    (medium / "empty").mkdir(0o700)
    remount(medium, "ro")
    with pytest.raises(lightck.RegionError, match="cannot make the folder: Read-only"):
        attach(medium / "new")
    with pytest.raises(lightck.RegionError, match="cannot make a region: Read-only"):
        attach(medium / "empty")
    with pytest.raises(lightck.RegionError, match="cannot open: Read-only"):
        attach(medium / "run", loop)
    again = adam_loop()
    info = lightck.restore(again.model, list(again.optimizers), medium / "run")
    assert info is not None and info.step == 2
    assert of_live(again.model, again.optimizers) == loop.seen[2]
    assert of_stored(medium / "run", 2) == loop.seen[2]
    assert steps_at(medium / "run") == [1, 2]


def bytes_in(message: str) -> list[int]:
    return [int(word) for word in message.replace(",", " ").split() if word.isdigit()]


def test_too_little_space_for_the_predicted_state_is_an_error_at_attach(
    mount: Callable[..., Path],
) -> None:
    medium = mount("size=8m")
    loop = adam_loop(width=512)  # 2 MiB of weights, 4 MiB of state to come, twice
    needed = 2 * 3 * sum(p.nbytes for p in loop.model.parameters())
    with pytest.raises(lightck.RegionFullError, match=r"\d+ bytes needed, \d+ free") as e:
        attach(medium / "run", loop)
    assert max(bytes_in(str(e.value))) > needed
    assert not list((medium / "run").iterdir()), "a half-made region was left behind"
    small = adam_loop()
    with attach(medium / "run", small):
        small.run(1)
    assert steps_at(medium / "run") == [1]


class Unpredictable(torch.optim.Optimizer):
    """Its constructor wants more than parameters, so that no clone can be stepped."""

    def __init__(self, params: object, needed: object) -> None:
        super().__init__(params, {"lr": 0.1})  # type: ignore[arg-type]
        self._needed = needed

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                for i in range(4):
                    state.setdefault(f"memory {i}", torch.zeros_like(p)).add_(1)
                p.sub_(group["lr"] * p.grad)


def test_too_little_space_for_state_nobody_could_predict_is_an_error_after_the_first_step(
    mount: Callable[..., Path],
) -> None:
    medium = mount("size=8m")
    model = mlp(512, 1)
    loop = Loop(model, Unpredictable(model.parameters(), object()), width=512)
    handle = attach(medium / "run", loop, on_error=lambda error: None)
    with pytest.raises(lightck.RegionFullError, match=r"\d+ bytes needed, \d+ free"):
        loop.run(1)
    handle.detach()
    assert steps_at(medium / "run") == []


def test_growth_that_fits_is_not_refused_for_the_sake_of_reserves(
    mount: Callable[..., Path],
) -> None:
    """The region grows by a quarter for the future where there is room, else by what is needed."""
    medium = mount("size=40m")
    model = mlp(512, 15)  # 15 MiB
    loop = Loop(model, torch.optim.SGD(model.parameters()), width=512)
    with attach(medium / "run", loop) as handle:
        loop.run(2)
        handle.wait()
        model.add_module("15", torch.nn.Linear(512, 512))
        loop.optimizers[0].add_param_group({"params": model[15:].parameters()})
        loop.run(1)  # snapshot 2 holds the new layer
        handle.wait()
        loop.note()
    assert handle.stats().failed == 0
    loop.check(medium / "run", [2, 3])


def test_a_failed_attach_to_an_old_region_keeps_its_snapshots(mount: Callable[..., Path]) -> None:
    medium = mount("size=8m")
    small = adam_loop()
    with attach(medium / "run", small):
        small.run(2)
        small.note()
    with pytest.raises(lightck.RegionFullError, match="bytes"):
        attach(medium / "run", adam_loop(width=1024), overwrite=True)
    small.check(medium / "run", [1, 2])
    with attach(medium / "run", small):
        small.run(1)
        small.note()
    small.check(medium / "run", [2, 3])
