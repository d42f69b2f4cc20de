"""Which store a URL names: by the environment, and by profiles of the multi-storage client."""

from __future__ import annotations

import json
import traceback
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt import OptionError
from mcore_ckpt.storage._s3 import S3Client
from mcore_ckpt.storage._s3_signing import Credentials, botocore_session, signed
from mcore_ckpt.storage.resolve import storage_at


@pytest.fixture
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("multistorageclient", reason="reads its configuration")

    def write(**named: Any) -> None:
        (tmp_path / "msc.json").write_text(json.dumps({"profiles": named}))

    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.json"))
    return write


def provider(kind: str, **options: Any) -> dict[str, Any]:
    return {"storage_provider": {"type": kind, "options": options}}


def test_a_profile_of_files_is_a_directory(profiles: Any, tmp_path: Path) -> None:
    profiles(scratch=provider("file", base_path=str(tmp_path)))
    storage_at("msc://scratch/run/iter_0000001").ensure()
    storage_at("msc://scratch/run/iter_0000001").publish("file", b"x")
    assert (tmp_path / "run" / "iter_0000001" / "file").read_bytes() == b"x"


def test_a_profile_of_s3_names_bucket_prefix_server_and_credentials(
    profiles: Any, s3_directory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = provider(
        "s3",
        base_path=f"{s3_directory.bucket}/{s3_directory.prefix}",
        endpoint_url="${STORE}",
        region_name="us-east-1",
    )
    keys = {"access_key": "profile-key", "secret_key": "profile-secret"}
    profiles(store={**profile, "credentials_provider": {"type": "S3Credentials", "options": keys}})
    monkeypatch.setenv("STORE", s3_directory.server)
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    storage = storage_at("msc://store/run")
    storage.publish("file", b"x")
    assert s3_directory.get("run/file") == b"x"
    assert storage.path("file") == "msc://store/run/file"
    assert "profile-secret" not in repr(vars(storage))


@pytest.mark.parametrize(
    ("url", "profile", "message"),
    [
        ("msc://known/run", {"storage_provider": {"type": "s3", "options": {"secret": 1}}}, "not valid"),
        ("msc://other/run", provider("file", base_path="/"), r"there is no profile 'other': .*msc\.json has known"),
        ("msc://known/run", provider("oci", base_path="b"), "is of type 'oci'; expected file, s3"),
        (
            "msc://known/run",
            {
                **provider("s3", base_path="b"),
                "credentials_provider": {"type": "Other", "options": {"secret_key": "s"}},
            },
            "expected type S3Credentials",
        ),
        ("msc://", provider("file", base_path="/"), "expected msc://profile/prefix"),
        ("s3://", provider("file", base_path="/"), "expected s3://bucket/prefix"),
    ],
)
def test_what_cannot_be_reached_is_named(profiles: Any, url: str, profile: Any, message: str) -> None:
    profiles(known=profile)
    with pytest.raises(OptionError, match=message):
        storage_at(url)


def test_without_credentials_a_request_says_where_they_are_looked_for(
    s3_directory: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    botocore_session.cache_clear()
    with pytest.raises(OptionError, match="no credentials for S3 were found: set AWS_ACCESS_KEY_ID"):
        storage_at(s3_directory.url).list()


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"])
def test_a_credential_with_a_newline_is_refused_and_not_shown(
    s3_directory: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A secret that was mounted as a file, or came out of `echo`."""
    monkeypatch.setenv(name, "what-nobody-may-see\n")
    botocore_session.cache_clear()
    with pytest.raises(OptionError, match="has a character that cannot be part of it") as refused:
        storage_at(s3_directory.url).list()
    assert "nobody" not in "".join(traceback.format_exception(refused.value))


def test_credentials_that_cannot_be_had_for_a_moment_are_asked_for_again(
    s3_directory: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("botocore", reason="asks the process")
    given = tmp_path / "asked"
    answer = {"Version": 1, "AccessKeyId": "test-key", "SecretAccessKey": "test-secret"}
    (tmp_path / "process").write_text(
        f"#!/bin/sh\nif [ ! -e {given} ]; then touch {given}; echo shown-by-nobody >&2; exit 1; fi\n"
        f"echo '{json.dumps(answer)}'\n"
    )
    (tmp_path / "process").chmod(0o755)
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {tmp_path / 'process'}\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    botocore_session.cache_clear()
    storage_at(s3_directory.url).publish("file", b"x")
    assert given.exists()
    assert s3_directory.get("file") == b"x"


def test_a_profile_of_aws_that_is_not_there_is_named(s3_directory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("botocore", reason="reads AWS's configuration")
    monkeypatch.setenv("AWS_PROFILE", "absent")
    botocore_session.cache_clear()
    with pytest.raises(OptionError, match=r"ProfileNotFound, .*look at AWS_PROFILE"):
        storage_at(s3_directory.url)


def test_a_request_is_signed_as_amazon_signs_it() -> None:
    """Compared with botocore's signature of the same request at the same moment."""
    auth = pytest.importorskip("botocore.auth", reason="signs as Amazon does")
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials as TheirCredentials

    host, region = "bucket.s3.eu-west-1.amazonaws.com", "eu-west-1"
    query = {"uploadId": "a/b+c=", "partNumber": "7", "uploads": ""}
    own = Credentials("key", "secret", "a-token")
    target, headers = signed("PUT", host, "/run a/ü~.distcp", query, {"x-amz-checksum-crc32": "AAAAAA=="}, own, region)

    class Unsigned(auth.S3SigV4Auth):  # type: ignore[misc, name-defined]
        def payload(self, request: Any) -> str:
            return "UNSIGNED-PAYLOAD"

        def _modify_request_before_signing(self, request: Any) -> None:
            super()._modify_request_before_signing(request)
            request.headers.replace_header("X-Amz-Date", headers["x-amz-date"])

    request = AWSRequest("PUT", f"https://{host}{target}", headers={"x-amz-checksum-crc32": "AAAAAA=="})
    signer = Unsigned(TheirCredentials("key", "secret", "a-token"), "s3", region)
    request.context["timestamp"] = headers["x-amz-date"]
    import datetime
    from unittest import mock

    moment = datetime.datetime.strptime(headers["x-amz-date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=datetime.timezone.utc)
    with mock.patch.object(auth, "get_current_datetime", return_value=moment, create=True):
        signer.add_auth(request)
    ours, theirs = headers["Authorization"], request.headers["Authorization"]
    assert ours.rpartition("Signature=")[2] == theirs.rpartition("Signature=")[2]


def test_a_bucket_of_amazons_is_a_host_of_its_own() -> None:
    from mcore_ckpt.storage._s3 import S3Place

    def server(**where: Any) -> tuple[str, str]:
        client = S3Client(S3Place(**where), lambda: Credentials("k", "s"), "s3://b")
        return client._server.netloc, client._path

    assert server(bucket="b", region="eu-west-1") == ("b.s3.eu-west-1.amazonaws.com", "")
    assert server(bucket="b.c", region="eu-west-1") == ("s3.eu-west-1.amazonaws.com", "/b.c")
    assert server(bucket="b", endpoint="https://store:9000") == ("store:9000", "/b")
