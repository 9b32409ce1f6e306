"""Announced ends: a server that answers as each cloud's does, one that hangs, and one that lies."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lightck import notices
from lightck.errors import ConfigError, LightckError
from lightck.failure.triggers import PreemptionNotice
from lightck.types import Probe

LONG_S = 100.0
AWS_ACTION = "/latest/meta-data/spot/instance-action"
AWS_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
GCP = "/computeMetadata/v1/instance/preempted"
AZURE = "/metadata/scheduledevents"
AZURE_NAME = "/metadata/instance/compute/name"


class Server:
    """A metadata server; `answers` maps a path to a text, or to a status."""

    def __init__(self) -> None:
        self.answers: dict[str, str | int] = {}
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        self.token = "token-1"
        self.need_token = False
        self.headers: dict[str, str] = {}
        self.go_on = threading.Event()
        self.hang = False
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:  # noqa: N802
                outer.answer(self)

            do_PUT = do_GET

            def log_message(self, *args: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.base = f"http://127.0.0.1:{self.http.server_port}"
        serve = threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True)
        serve.start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.asked.append((request.command, request.path, headers))
        if self.hang:
            self.go_on.wait(LONG_S)
            return
        told: str | int = self.answers.get(path, 404)
        if self.need_token and path == "/latest/api/token":
            good = headers.get("x-aws-ec2-metadata-token-ttl-seconds") and request.command == "PUT"
            told = self.token if good else 400
        elif self.need_token and headers.get("x-aws-ec2-metadata-token") != self.token:
            told = 401
        text = told.encode() if isinstance(told, str) else b"<html>no</html>"
        request.send_response(200 if isinstance(told, str) else told)
        for name, value in {**self.headers, "Content-Length": str(len(text))}.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(text)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(notices, "LOOK_S", 0.0)
    made = Server()
    yield made
    made.go_on.set()
    made.http.shutdown()
    made.http.server_close()


def test_ec2_announces_an_interruption_and_wants_a_token(server: Server) -> None:
    server.need_token = True
    notice = notices.aws(base=server.base)
    assert notice() is False
    server.answers[AWS_ACTION] = '{"action": "terminate", "time": "2026-11-26T08:22:00Z"}'
    assert notice() is True
    assert [path for _, path, _ in server.asked].count("/latest/api/token") == 1
    server.token = "token-2"  # the first has expired
    assert notice() is True


def test_ec2_recommends_to_rebalance_as_a_symptom(server: Server) -> None:
    notice = notices.aws(base=server.base)
    assert isinstance(notice, Probe)
    assert notice.read() == {}
    server.answers[AWS_REBALANCE] = '{"noticeTime": "2026-11-26T08:22:00Z"}'
    assert notice.read() == {"rebalance": 1.0}
    assert notice() is False, "a recommendation is no end"


def test_google_announces_a_preemption(server: Server) -> None:
    server.headers = {"Metadata-Flavor": "Google"}
    server.answers[GCP] = "FALSE"
    notice = notices.gcp(base=server.base)
    assert notice() is False
    server.answers[GCP] = "TRUE"
    assert notice() is True
    assert server.asked[-1][2]["metadata-flavor"] == "Google"
    server.headers = {}
    with pytest.raises(LightckError, match="no answer of that cloud's"):
        notice()


@pytest.mark.parametrize(
    ("kind", "machine", "announced"),
    [
        ("Preempt", "vm_1", True),
        ("Terminate", "vm_1", True),
        ("Reboot", "vm_1", True),
        ("Freeze", "vm_1", False),
        ("Preempt", "vm_2", False),
    ],
)
def test_azure_announces_what_happens_to_this_machine(
    server: Server, kind: str, machine: str, announced: bool
) -> None:
    server.answers = {AZURE_NAME: "vm_1", AZURE: '{"DocumentIncarnation": 1, "Events": []}'}
    notice = notices.azure(base=server.base)
    assert notice() is False
    server.answers[AZURE] = (
        '{"Events": [{"EventType": "Freeze", "Resources": ["vm_1"]},'
        f' {{"EventType": "{kind}", "Resources": ["{machine}"]}}]}}'
    )
    assert notice() is announced
    assert server.asked[-1][1:2] == (f"{AZURE}?api-version=2020-07-01",)
    assert server.asked[-1][2]["metadata"] == "true"


CLOUDS: dict[str, Callable[..., Callable[[], bool]]] = {
    "aws": notices.aws,
    "gcp": notices.gcp,
    "azure": notices.azure,
}


@pytest.mark.parametrize("make", CLOUDS.values(), ids=CLOUDS)
@pytest.mark.parametrize("text", ["<html>sign in</html>", "{}", "[1]", '{"Events": [7]}', ""])
def test_garbage_is_no_announcement_and_says_so(
    server: Server, make: Callable[..., Callable[[], bool]], text: str
) -> None:
    server.answers = {AWS_ACTION: text, GCP: text, AZURE: text, AZURE_NAME: "vm_1"}
    notice = make(base=server.base)
    for _ in range(2):
        with pytest.raises(LightckError, match="no answer of that cloud's: expected"):
            notice()


@pytest.mark.parametrize("make", CLOUDS.values(), ids=CLOUDS)
def test_a_server_that_fails_or_is_not_there_says_where(
    server: Server, make: Callable[..., Callable[[], bool]]
) -> None:
    server.answers = {AWS_ACTION: 500, GCP: 500, AZURE: 500}
    for base in (server.base, "http://127.0.0.1:1"):
        with pytest.raises(LightckError, match=f"gave no answer at {base}/"):
            make(base=base)()


@pytest.mark.parametrize("make", CLOUDS.values(), ids=CLOUDS)
def test_a_server_that_hangs_is_left_after_a_second(
    server: Server, make: Callable[..., Callable[[], bool]]
) -> None:
    server.hang = True
    notice = make(base=server.base)
    began = time.monotonic()
    with pytest.raises(LightckError, match="timed out"):
        notice()
    assert time.monotonic() - began >= notices.TIMEOUT_S
    server.hang = False
    server.go_on.set()
    server.headers = {"Metadata-Flavor": "Google"}
    server.answers = {GCP: "FALSE", AZURE_NAME: "vm_1", AZURE: '{"Events": []}'}
    assert notice() is False, "it is asked again"


def test_a_server_is_asked_every_five_seconds_at_most(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "LOOK_S", 5.0)
    now = [100.0]
    monkeypatch.setattr(notices.time, "monotonic", lambda: now[0])
    server.headers = {"Metadata-Flavor": "Google"}
    server.answers[GCP] = "FALSE"
    notice = notices.gcp(base=server.base)
    for _ in range(3):
        assert notice() is False
    assert len(server.asked) == 1
    server.answers[GCP] = "no"
    for now[0] in (105.0, 106.0, 109.0):  # between looks, too: it is one error, told once
        with pytest.raises(LightckError):
            notice()
    assert len(server.asked) == 2


def test_a_proxy_is_not_asked(server: Server) -> None:
    server.headers = {"Metadata-Flavor": "Google"}
    server.answers[GCP] = "TRUE"
    code = f"from lightck import notices; print(notices.gcp(base={server.base!r})())"
    proxy = {"http_proxy": "http://127.0.0.1:1", "no_proxy": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | proxy, capture_output=True, text=True
    )
    assert done.stdout == "True\n", done.stderr


def test_what_is_not_asked_for_is_not_asked(server: Server) -> None:
    notices.aws(base=server.base)
    notices.either(notices.gcp(base=server.base), notices.azure(base=server.base))
    assert server.asked == []


def test_a_notice_works_as_the_failure_path_polls_it(server: Server) -> None:
    server.headers = {"Metadata-Flavor": "Google"}
    told, errors = threading.Event(), list[LightckError]()
    server.answers[GCP] = "who knows"
    polled = PreemptionNotice(
        notices.gcp(base=server.base), told.set, errors.append, period_s=0.001
    )
    try:
        deadline = time.monotonic() + LONG_S
        while len(server.asked) < 5:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        assert len(errors) == 1, "told once"
        server.answers[GCP] = "TRUE"
        assert told.wait(LONG_S)
    finally:
        polled.stop()


# ---- Slurm, and which cloud it is --------------------------------------------------------------


def test_slurm_announces_the_end_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "LOOK_S", 0.0)
    now = [1000.0]
    monkeypatch.setattr(notices.time, "time", lambda: now[0])
    assert "environ(" not in str(inspect.signature(notices.slurm)), "help() prints no variables"
    notice = notices.slurm(120, environment={"SLURM_JOB_END_TIME": "2000"})
    for now[0], true in ((1000.0, False), (1879.0, False), (1880.0, True), (3000.0, True)):
        assert notice() is true


@pytest.mark.parametrize("environment", [{}, {"SLURM_JOB_END_TIME": "tomorrow"}])
def test_outside_of_a_job_with_a_limit_there_is_no_notice_of_slurms(
    environment: dict[str, str],
) -> None:
    with pytest.raises(ConfigError, match="SLURM_JOB_END_TIME = "):
        notices.slurm(environment=environment)


@pytest.mark.parametrize(
    ("vendor", "kind"),
    [("Amazon EC2", "_Aws"), ("Google", "_Gcp"), ("Microsoft Corporation", "_Azure")],
)
def test_the_cloud_is_known_by_its_vendor(tmp_path: Path, vendor: str, kind: str) -> None:
    file = tmp_path / "sys/class/dmi/id/sys_vendor"
    file.parent.mkdir(parents=True)
    file.write_text(f"{vendor}\n")
    assert type(notices.cloud(root=tmp_path)).__name__ == kind


def test_another_machine_is_of_no_cloud(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected one of Amazon EC2, Google"):
        notices.cloud(root=tmp_path)


def test_either_asks_all_also_when_one_cannot_say() -> None:
    said = {"one": False, "two": False}

    def fails() -> bool:
        raise OSError("no route")

    notice = notices.either(fails, lambda: said["one"], lambda: said["two"])
    with pytest.raises(OSError, match="no route"):
        notice()
    said["two"] = True
    assert notice() is True
    assert notices.either(lambda: False)() is False
