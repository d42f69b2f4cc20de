"""Which bucket a URL names, and by which client it is reached.

    s3://bucket/prefix      Amazon's S3, or the server of AWS_ENDPOINT_URL_S3; configured as AWS's own tools are
    gs://bucket/prefix      Google Cloud Storage, by its application default credentials, or the server of
                            STORAGE_EMULATOR_HOST
    az://container/prefix   Azure Blob Storage, of the account AZURE_STORAGE_ACCOUNT_NAME
    msc://profile/prefix    a profile of NVIDIA's multi-storage client, out of the file that MSC_CONFIG names

One client is kept for each bucket, since it keeps connections and what it has learnt of the store.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.core.paths import store_url
from mcore_ckpt.storage._local import LocalStorage
from mcore_ckpt.storage._object_client import ObjectClient
from mcore_ckpt.storage._objects import ObjectStorage
from mcore_ckpt.storage._s3 import S3Client, S3Place
from mcore_ckpt.storage._s3_signing import Credentials, botocore_session, credentials_of_aws
from mcore_ckpt.storage.base import Storage

_S3_PROFILES: Final = frozenset({"s3", "s8k", "gcs_s3", "ais_s3"})
_VARIABLES: Final = ("AWS_", "AZURE_", "CLOUDSDK_", "GOOGLE_", "STORAGE_EMULATOR_HOST")
_GOOGLE: Final = "https://storage.googleapis.com"
_AZURE_ENDPOINTS: Final = ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
# In a URL of Azure's: a signature, which is a credential.
_SIGNATURE: Final = re.compile(r"[?&]sig=")
_INSTALL: Final = "pip install '.[objects]' in a checkout of mcore_ckpt"

_WHERE_CONFIG_LIES: Final = ("HOME", "XDG_CONFIG_HOME", "XDG_CONFIG_DIRS")

# Of the multi-storage client, by where it was looked for: the file's state, what it says, its path.
_configs: dict[tuple[str | None, ...], tuple[tuple[int, ...] | None, Any, str]] = {}
_clients: dict[tuple[Any, ...], ObjectClient] = {}
_lock = threading.Lock()


def _forget() -> None:
    global _lock  # a thread of the process that forked this one may have held it
    _lock = threading.Lock()
    _clients.clear()


os.register_at_fork(after_in_child=_forget)


def open_store(url: str, deadline_s: float | None = None) -> Storage:
    """The storage of a directory in an object store.

    Raises:
        OptionError: the URL names no bucket or profile, or what it takes to reach it is missing.
    """
    url = store_url(url) or url
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.rstrip("/").partition("/")
    if scheme == "az" and _SIGNATURE.search(rest):
        raise OptionError(
            f"az://{bucket.partition('?')[0]}: the URL has a token (SAS) in it; set AZURE_STORAGE_SAS_TOKEN to the "
            "token, and leave it out of the URL. It is not shown here"
        )
    if scheme == "msc":
        return _of_profile(url, bucket, prefix, deadline_s)
    return _objects(_client(scheme, bucket, {}), prefix, url, deadline_s)


def _objects(client: ObjectClient, prefix: str, url: str, deadline_s: float | None) -> ObjectStorage:
    return ObjectStorage(client, "/".join(part for part in prefix.split("/") if part), url, open_store, deadline_s)


def _client(scheme: str, bucket: str, options: Mapping[str, Any]) -> ObjectClient:
    made = _MAKERS[scheme]
    # What is in the environment may change between two saves of a process, in tests above all.
    environment = tuple(sorted((k, v) for k, v in os.environ.items() if k.startswith(_VARIABLES)))
    key = (scheme, bucket, tuple(sorted((k, repr(v)) for k, v in options.items())), environment)
    with _lock:
        if key not in _clients:
            _clients[key] = made(bucket, options)
        return _clients[key]


def _s3(bucket: str, options: Mapping[str, Any]) -> ObjectClient:
    profile = options.get("profile_name")
    session = botocore_session(profile, os.getpid())
    try:
        configured = {} if session is None else session.get_scoped_config()
    except Exception as error:  # noqa: BLE001
        # ProfileNotFound, ConfigParseError: the text of others may show what stands in the file.
        raise OptionError(
            f"s3://{bucket}: AWS's configuration cannot be used ({type(error).__name__}, raised by botocore); look at "
            "AWS_PROFILE and the files of AWS's tools"
        ) from None
    region = (
        options.get("region_name")
        or os.environ.get("AWS_REGION")
        or os.environ.get("AWS_DEFAULT_REGION")
        or configured.get("region")
        or "us-east-1"
    )
    endpoint = (
        options.get("endpoint_url")
        or os.environ.get("AWS_ENDPOINT_URL_S3")
        or os.environ.get("AWS_ENDPOINT_URL")
        or configured.get("endpoint_url")
        or ""
    )
    verify = options.get("verify")
    if verify is None:
        verify = os.environ.get("AWS_CA_BUNDLE") or True
    credentials: Callable[[], Credentials] = options.get("credentials") or credentials_of_aws(profile)
    _check_endpoint(f"s3://{bucket}", endpoint, "AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL")
    return S3Client(S3Place(bucket, region, endpoint, verify), credentials, f"s3://{bucket}")


def _gs(bucket: str, options: Mapping[str, Any]) -> ObjectClient:
    endpoint = options.get("endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST") or _GOOGLE
    if "://" not in endpoint:  # as Google's clients take it
        endpoint = f"http://{endpoint}"
    _check_endpoint(f"gs://{bucket}", endpoint, "STORAGE_EMULATOR_HOST")
    try:
        from mcore_ckpt.storage._gcs import GcsClient

        if not endpoint.startswith("https:"):  # a token that is sent without encryption is everybody's
            return GcsClient(bucket, endpoint, None)
        from mcore_ckpt.storage._gcs_tokens import GoogleTokens
    except ImportError as error:
        raise OptionError(f"gs://{bucket}: needs google-auth and google-crc32c ({error}); {_INSTALL}") from error
    return GcsClient(bucket, endpoint, GoogleTokens())


def _check_endpoint(where: str, endpoint: str, variables: str) -> None:
    """Raise `OptionError` unless it is the URL of a server alone. It is not shown: a password may be part of it."""
    if not endpoint:
        return
    try:
        parts = urlsplit(endpoint)
        is_server = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_server = False
    if not is_server or any(each in endpoint for each in "@?#") or not endpoint.isprintable() or " " in endpoint:
        raise OptionError(
            f"{where}: the endpoint ({variables}, or endpoint_url of a profile) is no URL of a server; expected "
            "https://HOST or https://HOST:PORT, without user name, password or token. It is not shown here"
        ) from None


def _by_obstore(scheme: str) -> Callable[[str, Mapping[str, Any]], ObjectClient]:
    def make(bucket: str, options: Mapping[str, Any]) -> ObjectClient:
        try:
            from mcore_ckpt.storage._azure import AzureClient
            from mcore_ckpt.storage._obstore import ObstoreClient
        except ImportError as error:
            raise OptionError(f"{scheme}://{bucket}: needs obstore ({error}); {_INSTALL}") from error
        if scheme != "az":
            return ObstoreClient(scheme, bucket, options)
        for endpoint in (options.get("endpoint_url"), *map(os.environ.get, _AZURE_ENDPOINTS)):
            _check_endpoint(f"az://{bucket}", endpoint or "", ", ".join(_AZURE_ENDPOINTS))
        return AzureClient(bucket, options)

    return make


_MAKERS: Final[dict[str, Callable[[str, Mapping[str, Any]], ObjectClient]]] = {
    "s3": _s3,
    "gs": _gs,
    "az": _by_obstore("az"),
    "memory": _by_obstore("memory"),
}


# Profiles of the multi-storage client


def _of_profile(url: str, name: str, prefix: str, deadline_s: float | None) -> Storage:
    profile = _profile(url, name)
    provider = profile.get("storage_provider") or {}
    kind, options = provider.get("type"), dict(provider.get("options") or {})
    base = str(options.pop("base_path", "") or "")
    if kind == "file":
        return LocalStorage(Path("/", base, prefix))
    bucket, _, base_prefix = base.strip("/").partition("/")
    if not bucket:  # the path below the profile begins with it
        bucket, _, prefix = prefix.partition("/")
    if not bucket:
        raise OptionError(f"{url}: neither the profile's base_path nor the URL names a bucket")
    path = f"{base_prefix}/{prefix}"
    if kind in _S3_PROFILES:
        credentials = _credentials(url, name, profile.get("credentials_provider"))
        return _objects(_client("s3", bucket, {**options, **credentials}), path, url, deadline_s)
    if kind in ("gcs", "azure"):
        if profile.get("credentials_provider"):
            raise OptionError(
                f"{url}: the credentials_provider of profile {name!r} ({kind}) is not supported; leave it out, and let "
                "the environment provide the credentials"
            )
        return _objects(_client({"gcs": "gs", "azure": "az"}[kind], bucket, options), path, url, deadline_s)
    raise OptionError(
        f"{url}: profile {name!r} is of type {kind!r}; expected file, s3, s8k, gcs_s3, ais_s3, gcs or azure"
    )


def _credentials(url: str, name: str, provider: Mapping[str, Any] | None) -> dict[str, Any]:
    if not provider:
        return {}
    options = provider.get("options") or {}
    if provider.get("type") != "S3Credentials" or not {"access_key", "secret_key"} <= set(options):
        raise OptionError(
            f"{url}: credentials_provider of profile {name!r}: expected type S3Credentials with access_key and "
            "secret_key, or none (then credentials are looked for as AWS's own tools do)"
        )
    return {
        "credentials": _Fixed(Credentials(*(options.get(k, "") for k in ("access_key", "secret_key", "session_token"))))
    }


class _Fixed:
    """Credentials that never change."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    def __call__(self) -> Credentials:
        return self._credentials

    def __repr__(self) -> str:  # tells clients apart; the hash changes with each process
        return f"credentials {hash(self._credentials):x}"


def _profile(url: str, name: str) -> Mapping[str, Any]:
    try:
        from multistorageclient.config import StorageClientConfig
    except ImportError as error:
        raise OptionError(
            f"{url}: profiles are read by the multi-storage client, which cannot be imported ({error}); "
            "pip install multi-storage-client"
        ) from error
    if name == "__filesystem__":
        return {"storage_provider": {"type": "file", "options": {"base_path": "/"}}}
    try:
        config, path = _read_once(StorageClientConfig.read_msc_config)
    except (ValueError, RuntimeError) as error:
        # Its text may show what stands there, credentials among it.
        raise OptionError(
            f"{url}: the multi-storage client finds its configuration not valid ({type(error).__name__}); "
            "look at the file that MSC_CONFIG names"
        ) from None
    profiles = (config or {}).get("profiles") or {}
    if name not in profiles:
        where = f"{path} has {', '.join(sorted(profiles)) or 'none'}" if path else "no file was found; set MSC_CONFIG"
        raise OptionError(f"{url}: there is no profile {name!r}: {where}")
    profile: Mapping[str, Any] = _expanded(profiles[name])
    return profile


def _read_once(read: Callable[[], tuple[Any, str | None]]) -> tuple[Any, str | None]:
    """The client's configuration: comparing it with its schema takes a tenth of a second of processor time."""
    named = os.environ.get("MSC_CONFIG")
    where = named and str(Path(named).absolute()), *(os.environ.get(each) for each in _WHERE_CONFIG_LIES)
    known = _configs.get(where)
    if known is not None and known[0] == _state_of(known[2]):
        return known[1:]
    config, path = read()
    if path is not None and b"include" not in Path(path).read_bytes():  # other files, which may change, too
        _configs[where] = _state_of(path), config, path
    return config, path


def _state_of(path: str) -> tuple[int, ...] | None:
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _expanded(value: Any) -> Any:
    """With variables of the environment put in, as the multi-storage client does."""
    if isinstance(value, str):
        return os.path.expandvars(value)
    if isinstance(value, Mapping):
        return {key: _expanded(item) for key, item in value.items()}
    return [_expanded(item) for item in value] if isinstance(value, list) else value
