from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from lightck.config import Config
from lightck.errors import ConfigError
from lightck.policy import Auto, EverySeconds
from lightck.types import Failure

_PRESETS = Path(__file__).parents[2] / "configs"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in list(os.environ):
        if variable.startswith("LIGHTCK_") or variable == "TORCHELASTIC_RUN_ID":
            monkeypatch.delenv(variable)


def _file(folder: Path, text: str) -> Path:
    file = folder / "run.toml"
    file.write_text(text)
    return file


def test_defaults_need_no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIGHTCK_POLICY", raising=False)
    config = Config.resolve()
    assert config == Config()
    assert config.path == Path.cwd() / "lightck-run"
    assert config.policy == Auto()
    assert config.run_id == "default"


def test_there_are_at_most_twenty_one_settings() -> None:
    assert len(dataclasses.fields(Config)) <= 21


def test_argument_beats_environment_beats_file_beats_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = _file(tmp_path, "slots = 3\nthreads = 3\npriority = 'normal'\n")
    monkeypatch.setenv("LIGHTCK_SLOTS", "4")
    monkeypatch.setenv("LIGHTCK_THREADS", "4")
    config = Config.resolve(file, slots=5)
    assert (config.slots, config.threads, config.priority) == (5, 4, "normal")
    assert config.chunk_bytes == 262_144


def test_a_config_object_stands_where_a_file_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTCK_THREADS", "4")
    config = Config.resolve(Config(slots=3, threads=3, priority="normal"), slots=5)
    assert (config.slots, config.threads, config.priority) == (5, 4, "normal")


def test_none_means_not_given() -> None:
    assert Config.resolve(None, slots=None, path=None) == Config()


def test_every_type_can_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {
        "PATH": "/mnt/pmem/1",
        "POLICY": "{ every_seconds = 2.5 }",
        "CHUNK_BYTES": "1_048_576",
        "NUMA_NODE": "1",
        "ON_ERROR": "raise",
        "PRIORITY": "normal",
        "OVERWRITE": "1",
        "PROOF": "true",
        "RUN_ID": "42",
        "CLOSE_TIMEOUT_S": "5",
        "THREADS": "",
    }
    for name, text in settings.items():
        monkeypatch.setenv(f"LIGHTCK_{name}", text)
    assert Config.resolve() == Config(
        path=Path("/mnt/pmem/1"),
        policy=EverySeconds(2.5),
        chunk_bytes=1 << 20,
        numa_node=1,
        on_error="raise",
        priority="normal",
        overwrite=True,
        proof=True,
        run_id="42",
        close_timeout_s=5.0,
    )


def test_run_id_defaults_to_torchelastic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    assert Config.resolve().run_id == "job-7"
    assert Config.resolve(run_id="mine").run_id == "mine"


def test_home_is_expanded() -> None:
    assert Config.resolve(path="~/run").path == Path.home() / "run"


def test_what_is_saved_at_a_failure_is_on_unless_it_is_turned_off() -> None:
    assert Config().failure == Config.resolve(failure="jit").failure == Failure()
    assert Config.resolve(failure="off").failure == "off"


def test_a_function_may_handle_errors() -> None:
    assert Config.resolve(on_error=print).on_error is print


@pytest.mark.parametrize("file", sorted(_PRESETS.glob("*.toml")), ids=lambda file: file.stem)
def test_presets_resolve_by_name_and_by_path(file: Path) -> None:
    config = Config.resolve(file.stem)
    assert config == Config.resolve(file) == Config.resolve(str(file))
    assert config != Config()


def test_the_presets_are_the_promised_ones() -> None:
    names = {file.stem for file in _PRESETS.glob("*.toml")}
    assert names == {"dram", "pmem-fsdax", "pmem-devdax", "cxl-numa", "disk"}


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("path", "", "folder"),
        ("path", 3, "folder"),
        ("policy", 0, "integer of 1 or more"),
        ("policy", {"every_step": 3}, "every_steps"),
        ("slots", 1, "from 2 to 16"),
        ("slots", 17, "from 2 to 16"),
        ("slots", 2.0, "integer"),
        ("slots", True, "integer"),
        ("threads", 65, "from 0 to 64"),
        ("chunk_bytes", 4097, "multiple of 4096"),
        ("chunk_bytes", 0, "from 4096"),
        ("priority", 19, "'idle', 'normal'"),
        ("schedule", "forward", "'eager', 'backward'"),
        ("durability", "host", "'medium', 'process'"),
        ("numa_node", -1, "from 0"),
        ("on_error", "ignore", "'warn', 'raise'"),
        ("overwrite", 1, "true or false"),
        ("proof", "yes", "true or false"),
        ("run_id", "", "not empty"),
        ("close_timeout_s", -1, "0 or more"),
        ("close_timeout_s", float("nan"), "finite"),
        ("failure", "save", "'jit', 'off'"),
        ("failure", {"signals": ["SIGKILL"]}, "that can be handled"),
        ("failure", {"signals": ["SIGSEGV"]}, "not of faults of the code"),
        ("failure", {"hangs": 2}, "has no hangs"),
        ("failure", {"grace_s": -1}, "grace_s = -1"),
        ("failure", Failure(on_failure=1), "on_failure = 1"),  # type: ignore[arg-type]
        ("update", "layerwise", "unknown setting"),
        ("slot", 3, "did you mean slots?"),
    ],
)
def test_bad_arguments_are_refused_with_key_value_and_what_is_allowed(
    name: str, value: Any, allowed: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.resolve(**{name: value})
    text = str(caught.value)
    assert f"{name} = {value!r} (argument)" in text
    assert allowed in text


def test_a_config_made_directly_is_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"slots = 1 \(Config\)"):
        Config(slots=1)


@pytest.mark.parametrize("text", ["slots = 1", "slots = true", "slotz = 3"])
def test_bad_values_in_a_file_name_the_file(tmp_path: Path, text: str) -> None:
    file = _file(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        Config.resolve(file)
    key = text.split()[0]
    assert f"{key} = " in str(caught.value)
    assert str(file) in str(caught.value)


def test_bad_values_in_the_environment_name_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTCK_SLOTS", "many")
    with pytest.raises(ConfigError, match=r"slots = 'many' \(environment variable LIGHTCK_SLOTS\)"):
        Config.resolve()


def test_a_misspelt_variable_is_pointed_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LIGHTCK_SLOT", "3")
    monkeypatch.setenv("LIGHTCK_NATIVE", "/x.so")
    with caplog.at_level(logging.WARNING):
        Config.resolve()
    assert [r.getMessage() for r in caplog.records] == [
        "environment variable LIGHTCK_SLOT has no effect; LIGHTCK_SLOTS?"
    ]


def test_files_that_cannot_be_read_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gone.toml"):
        Config.resolve(tmp_path / "gone.toml")
    with pytest.raises(ConfigError, match="is not TOML"):
        Config.resolve(_file(tmp_path, "slots ="))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not TOML"):
        Config.resolve(tmp_path / "binary.toml")
    with pytest.raises(ConfigError, match="config = 3"):
        Config.resolve(3)  # type: ignore[arg-type]


def test_an_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'drum': no such preset; must be one of cxl-numa, disk"):
        Config.resolve("drum")
