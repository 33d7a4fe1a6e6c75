"""`JobsApi` on Ray's own client. This module alone handles that client's private parts and oddities.

- The client prefers an address from the environment to a given one; here the given one is used.
- Its requests have no time limit; here each has one.
- Its errors are server tracebacks; here they are one sentence.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any

import aiohttp
import ray
import requests
from ray._private.ray_constants import DASHBOARD_ADDRESS, KV_NAMESPACE_DASHBOARD
from ray.exceptions import AuthenticationError, RayError
from ray.job_submission import JobSubmissionClient

from elastic.core.errors import UsageError
from elastic.observe.text import clean
from elastic.runtime import handed_environment
from elastic_jobs.submit.attempts import JobRecord, JobState, identity
from elastic_jobs.submit.jobs_api import AlreadySubmitted, ClusterFacts, Denied, PackageGone, Submission, Unreachable

logger = logging.getLogger(__name__)

_CONNECT_S = 10.0
_ANSWER_S = 60.0
_UPLOAD_S = 300.0
_AGENT_S = 60.0
_IDLE_S = 1.0
_LEAVE_S = 0.2
# Ray's node label from RAY_NODE_TYPE_NAME, a variable that only autoscalers set.
_NODE_GROUP = "ray.io/node-group"
# Ray's client logs every upload; our commands report the relevant ones.
for _name in ("ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk"):
    logging.getLogger(_name).setLevel(logging.WARNING)


class _Client(JobSubmissionClient):
    """Ray's client with time limits, and with its failures distinguished where they arise."""

    def __init__(self, address: str, headers: dict[str, Any]) -> None:
        super().__init__(address, headers=headers)
        # aiohttp has renamed the argument that the client passes for "the usual checks".
        self._ssl_context = True if self._ssl_context is None else self._ssl_context

    async def tail_job_logs(self, job_id: str) -> AsyncGenerator[str, None]:
        """As Ray's own, but the connection is closed even if the tail is left before its end."""
        limits = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        # The server answers a close only with its next line.
        leave = aiohttp.ClientWSTimeout(ws_close=_LEAVE_S)
        address = f"{self._address}/api/jobs/{job_id}/logs/tail"
        async with (
            aiohttp.ClientSession(cookies=self._cookies, headers=self._headers, timeout=limits) as session,
            session.ws_connect(address, ssl=self._ssl_context, timeout=leave, max_msg_size=0) as tail,
        ):
            async for message in tail:
                if message.type is aiohttp.WSMsgType.TEXT:
                    yield message.data

    def _do_request(self, method: str, endpoint: str, **kwargs: Any) -> Any:
        kwargs.setdefault("timeout", (_CONNECT_S, _UPLOAD_S if method == "PUT" else _ANSWER_S))
        try:
            return super()._do_request(method, endpoint, **kwargs)
        except AuthenticationError as error:
            raise _denied(self._address, str(error)) from error
        except requests.exceptions.RequestException as error:
            raise Unreachable(f"no Ray Jobs server answers at {self._address} ({_cause(error)})") from error


class RayJobsApi:
    """Implements `JobsApi`. `headers` are added to every request; the token comes from Ray's own settings."""

    def __init__(self, address: str, headers: Mapping[str, str] | None = None) -> None:
        """Raises Unreachable if no server answers there, Denied if it refuses our token."""
        self._address = address.rstrip("/")
        try:
            with _without_addresses():
                self._client = _Client(self._address, dict(headers or {}))
        except (Unreachable, Denied):
            raise
        except AuthenticationError as error:
            raise _denied(self._address, str(error)) from error
        # Not a Ray Jobs server: another status, no JSON, or JSON without a version.
        except (RuntimeError, ValueError, KeyError, TypeError, requests.exceptions.RequestException) as error:
            raise Unreachable(
                f"the server at {self._address} is not a Ray Jobs server ({_last(str(error))})"
            ) from error

    def cluster(self) -> ClusterFacts:
        version = self._json("/api/version")["ray_version"]
        listed = self._json("/api/v0/nodes?limit=10000&detail=1")["data"]["result"]["result"]
        living = [node for node in listed if node.get("state") == "ALIVE"]
        status = self._json("/api/cluster_status")["data"].get("clusterStatus") or {}
        return ClusterFacts(
            str(version),
            tuple(node.get("resources_total") or {} for node in living),
            autoscaling=_autoscaling(status, [node.get("labels") or {} for node in living]),
        )

    def submit(self, submission: Submission) -> None:
        runtime_env = dict(submission.runtime_env)
        if submission.archive is not None:
            runtime_env["working_dir"] = str(submission.archive)
        else:
            self._check_package(runtime_env.get("working_dir"))
        if submission.variables:
            named = {handed_environment.VARIABLE: self._handed(submission.variables)}
            runtime_env["env_vars"] = {**runtime_env.get("env_vars", {}), **named}
        deadline = time.monotonic() + _AGENT_S
        while not self._try_submit(submission, runtime_env):
            if time.monotonic() > deadline:
                raise Unreachable(f"the head node's agent has not started within {_AGENT_S:.0f} s; check its log")
            time.sleep(_IDLE_S)

    def _try_submit(self, submission: Submission, runtime_env: Mapping[str, Any]) -> bool:
        """False while a head node that has just started has no agent yet."""
        needs = submission.needs
        try:
            self._client.submit_job(
                entrypoint=submission.entrypoint,
                submission_id=submission.submission_id,
                metadata=dict(submission.metadata),
                runtime_env=dict(runtime_env),
                entrypoint_num_cpus=needs.cpus or None,
                entrypoint_memory=needs.memory_bytes or None,
                entrypoint_resources=dict(needs.resources) or None,
                entrypoint_label_selector=dict(needs.labels) or None,
            )
        except RuntimeError as error:
            if "already exists" in str(error):
                raise AlreadySubmitted(f"there is a job {submission.submission_id!r} already") from error
            if "No available agent" in str(error):
                return False
            raise Unreachable(f"the Jobs server did not accept the job: {_last(str(error))}") from error
        except ValueError as error:
            raise UsageError(f"the Jobs API does not accept this job: {_last(str(error))}") from error
        return True

    def find(self, submission_id: str) -> JobRecord | None:
        answer = self._client._do_request("GET", f"/api/jobs/{submission_id}")
        if answer.status_code == 404:
            return None
        return to_record(self._checked(answer))

    def records(self) -> tuple[JobRecord, ...]:
        return tuple(to_record(job) for job in self._json("/api/jobs/") if job.get("submission_id"))

    def tail(self, submission_id: str, skip_chars: int, ended: bool) -> Iterator[str]:
        if ended:
            yield self._log(submission_id)[skip_chars:]
            return
        loop = asyncio.new_event_loop()
        pieces = self._client.tail_job_logs(submission_id)
        awaited: asyncio.Task[str] | None = None
        try:
            while True:
                awaited = awaited or loop.create_task(_next(pieces))
                loop.run_until_complete(asyncio.wait({awaited}, timeout=_IDLE_S))
                if not awaited.done():
                    yield ""
                    continue
                try:
                    piece, awaited = awaited.result(), None
                except StopAsyncIteration:
                    return
                except (RuntimeError, aiohttp.ClientError, OSError) as error:
                    # The caller queries the job next, and tails again if it still runs.
                    logger.debug("the tail of %s ended: %s", submission_id, error)
                    return
                fresh, skip_chars = piece[skip_chars:], max(0, skip_chars - len(piece))
                if fresh:
                    yield fresh
        finally:
            loop.run_until_complete(_close(pieces, awaited))
            loop.close()

    def _log(self, submission_id: str) -> str:
        try:
            return str(self._json(f"/api/jobs/{submission_id}/logs")["logs"])
        except Unreachable as error:
            if isinstance(error.__cause__, requests.exceptions.ConnectionError):
                raise
            # The server answers, but the log is on the driver's node, which may be gone.
            logger.debug("the log of %s cannot be read: %s", submission_id, error)
            return ""

    def stop(self, submission_id: str) -> bool:
        answer = self._client._do_request("POST", f"/api/jobs/{submission_id}/stop")
        return bool(self._checked(answer).get("stopped"))

    def _handed(self, variables: Mapping[str, str]) -> str:
        """Put the variables into the control store, as Ray's client does with packages; returns under which name."""
        name = f"elastic-environment-{secrets.token_hex(16)}"
        packed = handed_environment.packed(variables)
        answer = self._client._do_request("PUT", f"/api/packages/gcs/{name}", data=packed)
        if answer.status_code != 200:
            raise Unreachable(f"the Jobs server at {self._address} did not take the environment: {_last(answer.text)}")
        return f"gcs://{name}"

    def _check_package(self, uri: str | None) -> None:
        """Checking a package also makes the cluster keep it for a few more minutes."""
        if uri is not None and uri.startswith("gcs://") and not self._client._package_exists(uri):
            raise PackageGone(
                "the cluster no longer has the package of this run: send it again with `elastic resume --job`"
            )

    def _json(self, endpoint: str) -> Any:
        return self._checked(self._client._do_request("GET", endpoint))

    def _checked(self, answer: Any) -> Any:
        if answer.status_code != 200:
            raise Unreachable(f"the Jobs server at {self._address} failed: {_last(answer.text)}")
        try:
            return answer.json()
        except ValueError as error:
            raise Unreachable(f"the server at {self._address} is not a Ray Jobs server") from error


def own_server() -> str:
    """The address of the Jobs server of the cluster that this process has joined. Raises Unreachable."""
    try:
        address = ray.experimental.internal_kv._internal_kv_get(DASHBOARD_ADDRESS, namespace=KV_NAMESPACE_DASHBOARD)
    except RayError as error:
        raise Unreachable("the cluster's control store does not know where its Jobs server is") from error
    if not address:
        raise Unreachable("the cluster's Jobs server has not published its address yet")
    return f"http://{address.decode()}"


def to_record(job: Mapping[str, Any]) -> JobRecord:
    """From the Jobs API's JSON."""
    run_id, attempt = identity(job.get("metadata"))
    return JobRecord(
        submission_id=job["submission_id"],
        state=JobState(job["status"]),
        run_id=run_id,
        attempt=attempt,
        exit_code=job.get("driver_exit_code"),
        error_type=job.get("error_type"),
        message=job.get("message") or "",
        started_at=_seconds(job.get("start_time")),
        ended_at=_seconds(job.get("end_time")),
        node=job.get("driver_node_id"),
        entrypoint=job.get("entrypoint") or "",
        metadata=job.get("metadata") or {},
        runtime_env=job.get("runtime_env") or {},
    )


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _autoscaling(status: Mapping[str, Any], labels: Sequence[Mapping[str, str]]) -> bool:
    """Whether an autoscaler has node types to offer. A cluster started by hand has one that only reports.

    Autoscaler v2 reports nothing here, but its node providers, KubeRay for example, label nodes with their group.
    """
    report = status.get("autoscalerReport")
    if report is None:
        return any(_NODE_GROUP in node for node in labels)
    return any(name != "local.cluster.node" for name in report.get("availableNodeTypes") or {})


async def _next(pieces: AsyncGenerator[str, None]) -> str:
    return await pieces.__anext__()


async def _close(pieces: AsyncGenerator[str, None], awaited: asyncio.Task[str] | None) -> None:
    if awaited is not None:
        awaited.cancel()
        await asyncio.wait({awaited}, timeout=_CONNECT_S)
    with contextlib.suppress(RuntimeError, aiohttp.ClientError, OSError):
        await pieces.aclose()


@contextlib.contextmanager
def _without_addresses() -> Iterator[None]:
    """The environment without Ray's addresses, which would override the given one."""
    names = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
    held = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(held)


def _denied(address: str, told: str) -> Denied:
    if "Forbidden" in told or "invalid" in told:
        return Denied(f"the cluster at {address} refuses this token: check RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH")
    return Denied(
        f"the cluster at {address} requires a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
    )


def _cause(error: BaseException) -> str:
    """The innermost informative reason: requests wraps several layers around "Connection refused"."""
    text = str(error)
    for known in ("Connection refused", "Name or service not known", "No route to host", "timed out", "CERTIFICATE"):
        if known in text:
            return known.lower()
    return clean(type(error).__name__)


def _last(text: str) -> str:
    """The last line of a server's traceback, as text that is safe to print."""
    lines = [line for line in text.splitlines() if line.strip()]
    return clean(lines[-1])[:300] if lines else "it gave no reason"
