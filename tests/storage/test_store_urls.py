"""Which store a URL names: by the environment, and by profiles of the multi-storage client."""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt import OptionError
from mcore_ckpt.core.options import checkpoint_path
from mcore_ckpt.storage.resolve import storage_at

pytestmark = pytest.mark.quick


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


def test_the_profile_of_the_guide_is_a_bucket(
    tmp_path: Path, s3_directory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("multistorageclient", reason="reads its configuration")
    profile = (Path(__file__).parents[2] / "docs/guides/store.md").read_text().partition("```yaml\n")[2]
    base = f"base_path: {s3_directory.bucket}/{s3_directory.prefix}"
    (tmp_path / "msc.yaml").write_text(profile.partition("```")[0].replace("base_path: bucket", base))
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.yaml"))
    storage_at("msc://store/run").publish("file", b"x")
    assert s3_directory.get("run/file") == b"x"


@pytest.mark.parametrize(("kind", "option"), [("s3", "region_name"), ("gcs", "project_id")])
def test_a_profile_names_bucket_prefix_server_and_credentials(
    kind: str, option: str, profiles: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = request.getfixturevalue(f"{kind}_directory")
    base = f"{objects.bucket}/{objects.prefix}"
    profile = provider(kind, base_path=base, endpoint_url="${STORE}", **{option: "us-east-1"})
    if kind == "s3":
        keys = {"access_key": os.environ["AWS_ACCESS_KEY_ID"], "secret_key": os.environ["AWS_SECRET_ACCESS_KEY"]}
        profile["credentials_provider"] = {"type": "S3Credentials", "options": keys}
    profiles(store=profile)
    monkeypatch.setenv("STORE", objects.server)
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "STORAGE_EMULATOR_HOST"):
        monkeypatch.delenv(name, raising=False)
    storage = storage_at("msc://store/run")
    storage.publish("file", b"x")
    assert objects.get("run/file") == b"x"
    assert storage.path("file") == "msc://store/run/file"
    assert "test-secret" not in repr(vars(storage))


@pytest.mark.parametrize(
    ("url", "profile", "message"),
    [
        ("msc://known/run", {"storage_provider": {"type": "s3", "options": {"secret": 1}}}, "not valid"),
        ("msc://other/run", provider("file", base_path="/"), r"there is no profile 'other': .*msc\.json has known"),
        (
            "msc://known/run",
            {
                **provider("s3", base_path="b"),
                "credentials_provider": {"type": "Other", "options": {"secret_key": "s"}},
            },
            "expected type S3Credentials",
        ),
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
    with pytest.raises(OptionError, match="no credentials for S3 were found: set AWS_ACCESS_KEY_ID"):
        storage_at(s3_directory.url).list()


def test_a_credential_with_a_newline_is_refused_and_not_shown(
    s3_directory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A secret that was mounted as a file, or came out of `echo`."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "what-nobody-may-see\n")
    with pytest.raises(OptionError, match="has a character that cannot be part of it") as refused:
        storage_at(s3_directory.url).list()
    assert "nobody" not in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize(
    ("url", "variable", "value"),
    [
        ("s3://bucket/run", "AWS_ENDPOINT_URL", "http://user:nobody@127.0.0.1:1"),
        ("gs://bucket/run", "STORAGE_EMULATOR_HOST", "http://user:[nobody@127.0.0.1:1"),
        ("az://container/run", "AZURE_STORAGE_ENDPOINT", "http://127.0.0.1:1/account?sig=nobody"),
        ("s3://bucket/run", "AWS_ENDPOINT_URL", "http://127.0.0.1:nobody"),
        ("az://container/run", "AZURE_STORAGE_SAS_TOKEN", "nobody"),
        ("az://container/run", "AZURE_STORAGE_ACCOUNT_KEY", "nobody!"),
        ("az://container/run?sv=1&sig=nobody", "AZURE_STORAGE_SAS_TOKEN", "sv=1&sig=nobody"),
        ("s3://bucket/run?X-Amz-Security-Token=nobody", "the environment", ""),
        ("https://account.blob.core.windows.net/container?sig=nobody", "the environment", ""),
    ],
)
def test_what_is_set_wrongly_is_named_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, url: str, variable: str, value: str
) -> None:
    """A password or a token may be part of an endpoint, or of a URL that was copied from a portal."""
    if url.startswith("gs://"):
        pytest.importorskip("google.cloud.storage", reason="speaks to Google's store")
    if url.startswith("az://"):
        pytest.importorskip("obstore", reason="speaks to Azure")
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv(variable, value)
    with pytest.raises(OptionError, match=variable) as refused:
        storage_at(checkpoint_path(url))
    shown = "".join(traceback.format_exception_only(refused.value))
    assert "nobody" not in shown
    assert refused.value.__suppress_context__ or refused.value.__context__ is None


@pytest.mark.parametrize(
    ("url", "package"), [("s3://bucket/run", "obstore"), ("az://container/run", "obstore"), ("gs://b/run", "google")]
)
def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, url: str, package: str) -> None:
    for module in ("obstore", "obstore.store", "google.auth", "google.cloud"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "mcore_ckpt.storage._gcs", raising=False)
    with pytest.raises(OptionError, match=f"needs a package that is not there .*{package}.*pip install"):
        storage_at(url)
