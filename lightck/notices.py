"""Announcements that this machine will end, as functions for `Failure(notice=...)`.

    failure = lightck.Failure(notice=notices.aws(), grace_s=100)  # from lightck import notices

Nothing is asked before that. A metadata server is asked every 5 s at most, with a time-out of a
second, and never through a proxy; one that does not answer, or not as that cloud's does, is no
announcement, and is told once.
"""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightck.errors import ConfigError, LightckError

LOOK_S = 5.0
"""Seconds between two looks, at least."""
TIMEOUT_S = 1.0
_LINK_LOCAL = "http://169.254.169.254"
_MOST = 1 << 16  # bytes of an answer
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    text: str
    flavor: str | None
    """The header Metadata-Flavor."""


class _Server:
    """A cloud's metadata server."""

    def __init__(self, base: str, headers: Mapping[str, str]) -> None:
        self._base, self._headers = base, headers

    def ask(
        self, path: str, headers: Mapping[str, str] | None = None, method: str = "GET"
    ) -> _Answer:
        """Return the answer, if its status is 200, or 401 or 404, which each mean something."""
        request = urllib.request.Request(
            self._base + path, method=method, headers={**self._headers, **(headers or {})}
        )
        try:
            with _OPENER.open(request, timeout=TIMEOUT_S) as answer:
                text = answer.read(_MOST).decode(errors="replace")
                return _Answer(200, text, answer.headers.get("Metadata-Flavor"))
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
                if error.code in (401, 404):
                    return _Answer(error.code, "", None)
            raise LightckError(
                f"the metadata server gave no answer at {self._base}{path}: {error}; is this"
                " machine one of that cloud's, and may this container reach it?"
            ) from error


class _Notice(ABC):
    """An announcement, which is looked for every `LOOK_S` at most."""

    def __init__(self) -> None:
        self._looked_s: float | None = None
        self._announced = False
        self._error: LightckError | None = None

    def __call__(self) -> bool:
        """Tell whether the end of this machine is announced, as of the last look.

        Raises:
            LightckError: it could not be known.
        """
        now = time.monotonic()
        if self._looked_s is None or now - self._looked_s >= LOOK_S:
            self._looked_s, self._announced, self._error = now, False, None
            try:
                self._announced = self._look()
            except LightckError as error:
                self._error = error
        # Between looks, too: who tells of the first error in a row must not take it for over.
        if self._error is not None:
            raise self._error
        return self._announced

    @abstractmethod
    def _look(self) -> bool: ...


class _Aws(_Notice):
    """EC2's; as a probe it also sees the recommendation to rebalance."""

    name = "aws"
    period_s = LOOK_S
    of_node = True

    def __init__(self, base: str) -> None:
        super().__init__()
        self._server = _Server(base, {})
        self._token = ""

    def _look(self) -> bool:
        told = self._get("/latest/meta-data/spot/instance-action")
        return told is not None and _entry(told, "action") in ("terminate", "stop", "hibernate")

    def read(self) -> Mapping[str, float]:
        """See `Probe`."""
        told = self._get("/latest/meta-data/events/recommendations/rebalance")
        return {"rebalance": 1.0} if told is not None and _entry(told, "noticeTime") else {}

    def _get(self, path: str) -> str | None:
        """Return the text at a path; None if nothing is there. A token lasts for some hours."""
        for _ in range(2):
            if not self._token:
                ttl = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
                self._token = self._server.ask("/latest/api/token", ttl, "PUT").text
            answer = self._server.ask(path, {"X-aws-ec2-metadata-token": self._token})
            if answer.status != 401:
                return answer.text if answer.status == 200 else None
            self._token = ""
        raise LightckError(f"EC2's metadata server does not take the token that it gave, at {path}")


class _Gcp(_Notice):
    """Google's."""

    def __init__(self, base: str) -> None:
        super().__init__()
        self._server = _Server(base, {"Metadata-Flavor": "Google"})

    def _look(self) -> bool:
        answer = self._server.ask("/computeMetadata/v1/instance/preempted")
        told = answer.text.strip()
        if told not in ("TRUE", "FALSE") or answer.flavor != "Google":
            raise _other(answer.text, "TRUE or FALSE, and the header Metadata-Flavor: Google")
        return told == "TRUE"


class _Azure(_Notice):
    """Azure's. The first question may take it two minutes: the time-outs until then are told."""

    def __init__(self, base: str) -> None:
        super().__init__()
        self._server = _Server(base, {"Metadata": "true"})
        self._name = ""

    def _look(self) -> bool:
        if not self._name:
            path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            self._name = self._server.ask(path).text.strip()
        told = self._server.ask("/metadata/scheduledevents?api-version=2020-07-01").text
        try:
            return any(
                event["EventType"] in ("Preempt", "Terminate", "Reboot")
                and self._name in event["Resources"]
                for event in _entry(told, "Events")
            )
        except (KeyError, TypeError) as error:
            raise _other(told, "Events with EventType and Resources") from error


class _Slurm(_Notice):
    """Slurm's time limit."""

    def __init__(self, end_s: float, before_s: float) -> None:
        super().__init__()
        self._at_s = end_s - before_s

    def _look(self) -> bool:
        return time.time() >= self._at_s


class _Either:
    """Several notices; who looks for probes finds those among them."""

    def __init__(self, notices: tuple[Callable[[], bool], ...]) -> None:
        self.notices = notices

    def __call__(self) -> bool:
        """Ask all, also if one cannot say; what it raised is raised if no other says yes."""
        said, failed = False, None
        for notice in self.notices:
            try:
                said = bool(notice()) or said
            except Exception as error:  # noqa: BLE001 - it may be the user's function
                failed = failed or error
        if failed is not None and not said:
            raise failed
        return said


def _other(told: str, expected: str) -> LightckError:
    return LightckError(f"{told[:100]!r} is no answer of that cloud's: expected {expected}")


def _entry(told: str, key: str) -> Any:
    """Return an entry of an answer in JSON."""
    try:
        return json.loads(told)[key]
    except (ValueError, KeyError, TypeError) as error:
        raise _other(told, f"JSON with {key!r}") from error


def aws(*, base: str = _LINK_LOCAL) -> Callable[[], bool]:
    """Return the notice of an EC2 spot instance's interruption, two minutes ahead.

    With it a policy that watches symptoms sees EC2's recommendation to rebalance, too.
    Source: Amazon EC2 User Guide, Spot Instance interruption notices; IMDSv2.
    """
    return _Aws(base)


def gcp(*, base: str = _LINK_LOCAL) -> Callable[[], bool]:
    """Return the notice of a Google Cloud VM's preemption, 30 s ahead.

    Source: https://cloud.google.com/compute/docs/instances/create-use-preemptible.
    """
    return _Gcp(base)


def azure(*, base: str = _LINK_LOCAL) -> Callable[[], bool]:
    """Return the notice of an Azure VM's eviction, termination or reboot, 30 s ahead or more.

    Source: https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events.
    """
    return _Azure(base)


def slurm(
    before_s: float = 120.0, *, environment: Mapping[str, str] | None = None
) -> Callable[[], bool]:
    """Return the notice that the time limit of this Slurm job is `before_s` seconds away.

    Raises:
        ConfigError: `$SLURM_JOB_END_TIME` is not set, or is no time.
    """
    # Not the default itself, which help() would print with all its values.
    text = (os.environ if environment is None else environment).get("SLURM_JOB_END_TIME", "")
    if not text.isdigit():
        raise ConfigError(
            f"SLURM_JOB_END_TIME = {text!r}: expected seconds since 1970, as Slurm sets it in a job"
            " with a time limit"
        )
    return _Slurm(float(text), before_s)


def cloud(*, root: Path = Path("/")) -> Callable[[], bool]:
    """Return the notice of the cloud that this machine belongs to, by its vendor's name.

    Raises:
        ConfigError: it is none of the three.
    """
    file = root / "sys/class/dmi/id/sys_vendor"
    vendor = file.read_text().strip() if file.exists() else ""
    known = {"Amazon EC2": aws, "Google": gcp, "Microsoft Corporation": azure}
    if vendor not in known:
        raise ConfigError(
            f"{file} says {vendor!r}: expected one of {', '.join(known)}; use aws(), gcp() or"
            " azure() of lightck.notices"
        )
    return known[vendor]()


def either(*notices: Callable[[], bool]) -> Callable[[], bool]:
    """Return the notice that one of several is there."""
    return _Either(notices)
