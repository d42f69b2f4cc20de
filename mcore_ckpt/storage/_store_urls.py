"""Which bucket a URL names, and by which client it is reached.

    s3://bucket/prefix      Amazon's S3, or the server of AWS_ENDPOINT_URL_S3; configured as AWS's own tools are
    gs://bucket/prefix      Google Cloud Storage, by its application default credentials, or the server of
                            STORAGE_EMULATOR_HOST
    az://container/prefix   Azure Blob Storage, of the account AZURE_STORAGE_ACCOUNT_NAME
    msc://profile/prefix    a profile of NVIDIA's multi-storage client, out of the file that MSC_CONFIG names

One client is kept for each bucket, since it keeps connections and what it has learnt of the store.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.storage._objects import ObjectClient, ObjectStorage
from mcore_ckpt.storage.base import Storage

_S3_PROFILES: Final = frozenset({"s3", "s8k", "gcs_s3", "ais_s3"})
_VARIABLES: Final = ("AWS_", "AZURE_", "CLOUDSDK_", "GOOGLE_", "STORAGE_EMULATOR_HOST")
_GOOGLE: Final = "https://storage.googleapis.com"
_S3_KEYS: Final = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_AZURE_ENDPOINTS: Final = ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
# With one of these obstore finds its way alone.
_AZURE_CREDENTIALS: Final = tuple(
    f"AZURE_{name}"
    for name in (
        *(f"STORAGE_{kind}_KEY" for kind in ("ACCOUNT", "ACCESS", "MASTER")),
        *("STORAGE_KEY", "STORAGE_SAS_TOKEN", "STORAGE_SAS_KEY", "STORAGE_TOKEN", "STORAGE_CLIENT_SECRET"),
        *("CLIENT_SECRET", "FEDERATED_TOKEN_FILE", "SKIP_SIGNATURE"),
    )
)
_INSTALL: Final = "pip install '.[objects]' in a checkout of mcore_ckpt"

_WHERE_CONFIG_LIES: Final = ("HOME", "XDG_CONFIG_HOME", "XDG_CONFIG_DIRS")

_clients: dict[tuple[Any, ...], ObjectClient] = {}
_lock = threading.Lock()


def _forget() -> None:
    global _lock  # a thread of the process that forked this one may have held it
    _lock = threading.Lock()
    _clients.clear()


os.register_at_fork(after_in_child=_forget)


def open_store(url: str, deadline_s: float | None) -> Storage:
    """The storage of a directory in an object store. Raises `OptionError` if it cannot be reached as configured."""
    scheme, bucket, prefix = _parts(url)
    if scheme == "msc":
        client, prefix = _of_profile(url, bucket, prefix)
    else:
        client = _client(scheme, bucket, {})
    parts = (part for part in prefix.split("/") if part not in ("", "."))
    return ObjectStorage(client, "/".join(parts), url, open_store, deadline_s)


def _parts(url: str) -> tuple[str, str, str]:
    """Scheme, bucket (or profile), and prefix."""
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.rstrip("/").partition("/")
    return scheme, bucket, prefix


def _client(scheme: str, bucket: str, options: Mapping[str, Any]) -> ObjectClient:
    made = _MAKERS[scheme]
    # What is in the environment may change between two saves of a process, in tests above all.
    environment = tuple(sorted((k, v) for k, v in os.environ.items() if k.startswith(_VARIABLES)))
    key = (scheme, bucket, tuple(sorted((k, repr(v)) for k, v in options.items())), environment)
    with _lock:
        if key not in _clients:
            try:
                _clients[key] = made(bucket, options)
            except ImportError as error:
                raise OptionError(
                    f"{scheme}://{bucket}: needs a package that is not there ({error}); {_INSTALL}"
                ) from error
        return _clients[key]


def _s3(bucket: str, options: Mapping[str, Any]) -> ObjectClient:
    from obstore.store import S3Store

    from mcore_ckpt.storage._obstore import ObstoreClient, hiding

    where = f"s3://{bucket}"
    keys = options.get("keys") or tuple(os.environ.get(each, "") for each in _S3_KEYS)
    profile = options.get("profile_name") or os.environ.get("AWS_PROFILE")
    session = None if not profile and all(keys[:2]) else _botocore_session(where, profile)
    configured = {} if session is None else session.get_scoped_config()
    environment = os.environ.get
    endpoint = (
        options.get("endpoint_url")
        or environment("AWS_ENDPOINT_URL_S3")
        or environment("AWS_ENDPOINT_URL")
        or configured.get("endpoint_url")
        or ""
    )
    _check_endpoint(where, endpoint, "AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL")
    config: dict[str, Any] = {
        "region": options.get("region_name")
        or environment("AWS_REGION")
        or environment("AWS_DEFAULT_REGION")
        or configured.get("region")
        or "us-east-1",
        # A dot in a bucket's name does not fit the certificate of its own host.
        "virtual_hosted_style_request": not endpoint and "." not in bucket,
        "unsigned_payload": True,
        "checksum_algorithm": "CRC64NVME",
        "disable_bulk_delete": True,  # not every server has it
        **({"endpoint": endpoint} if endpoint else {}),
    }
    more: dict[str, Any] = {}
    if session is not None:
        more["credential_provider"] = _OfBotocore(session)
        more["credential_provider"]()  # what is wrong with them is said in words of our own
    else:
        for name, value in zip(_S3_KEYS, keys, strict=True):
            _check_header(name, value)
        config |= {name.lower(): value for name, value in zip(_S3_KEYS, keys, strict=True) if value}
    client_options = _client_options(endpoint, options.get("verify", environment("AWS_CA_BUNDLE") or True))

    def make(**common: Any) -> Any:
        common["client_options"] |= client_options
        return S3Store(bucket, config=config, **more, **common)

    return ObstoreClient(where, make, hiding(keys), has_suffixes=True)


def _botocore_session(where: str, profile: str | None) -> Any:
    """AWS's own way to credentials and settings; None without botocore: obstore then finds its own."""
    try:
        import botocore.session
    except ImportError:
        return None
    session = botocore.session.Session(profile=profile)
    try:
        session.get_scoped_config()
    except Exception as error:  # noqa: BLE001
        # ProfileNotFound, ConfigParseError: the text of others may show what stands in the file.
        raise OptionError(
            f"{where}: AWS's configuration cannot be used ({type(error).__name__}, raised by botocore); look at "
            "AWS_PROFILE and the files of AWS's tools"
        ) from None
    return session


class _OfBotocore:
    """Credentials, as obstore asks for them. botocore renews what expires ten minutes before it does."""

    _ATTEMPTS: Final = 3
    _VALID: Final = timedelta(minutes=10)

    def __init__(self, session: Any) -> None:
        self._session = session

    def __call__(self) -> dict[str, Any]:
        for attempt in range(self._ATTEMPTS):
            try:
                credentials = self._session.get_credentials()
                found = None if credentials is None else credentials.get_frozen_credentials()
                break
            except Exception as error:  # noqa: BLE001 (botocore's, and those of what it asks)
                # Their text may show what a process or a service has answered, credentials among it.
                if attempt + 1 == self._ATTEMPTS:
                    raise OptionError(
                        f"credentials for S3 cannot be had: {type(error).__name__}, raised by botocore"
                    ) from None
                time.sleep(attempt + 0.5)
        if found is None:
            raise OptionError(
                "no credentials for S3 were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile in the"
                " files of AWS's tools"
            )
        for name, value in zip(_S3_KEYS, found, strict=False):
            _check_header(name, value or "")
        return {
            "access_key_id": found.access_key,
            "secret_access_key": found.secret_key,
            "token": found.token,
            "expires_at": datetime.now(timezone.utc) + self._VALID,
        }


def _check_header(name: str, value: str) -> None:
    """Raise `OptionError` for what cannot stand in a request's header: obstore would panic."""
    if not all("!" <= character <= "~" for character in value):
        raise OptionError(
            f"the credentials for S3: {name} has a character that cannot be part of it, such as a space "
            "or a newline at its end; it is not shown here. Set it again, without that character"
        )


def _az(container: str, options: Mapping[str, Any]) -> ObjectClient:
    from obstore.exceptions import BaseError
    from obstore.store import AzureStore

    from mcore_ckpt.storage._obstore import ObstoreClient, hiding

    where = f"az://{container}"
    for endpoint in (options.get("endpoint_url"), *map(os.environ.get, _AZURE_ENDPOINTS)):
        _check_endpoint(where, endpoint or "", ", ".join(_AZURE_ENDPOINTS))
    endpoint = options.get("endpoint_url") or next(filter(None, map(os.environ.get, _AZURE_ENDPOINTS)), "")
    config = {"endpoint": options["endpoint_url"]} if options.get("endpoint_url") else {}
    client_options = _client_options(endpoint, True)
    is_local = "AZURE_STORAGE_USE_EMULATOR" in os.environ
    more: dict[str, Any] = {}
    if not is_local and not any(os.environ.get(name) for name in _AZURE_CREDENTIALS):
        with contextlib.suppress(ImportError):
            from obstore.auth.azure import AzureCredentialProvider

            more["credential_provider"] = AzureCredentialProvider()

    def make(**common: Any) -> Any:
        common["client_options"] |= {**client_options, **({"allow_http": True} if is_local else {})}
        try:
            return AzureStore(container, config=config, **more, **common)
        except BaseError:  # whose text may show what is not to be shown
            raise OptionError(
                f"{where}: one of AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN and "
                "AZURE_STORAGE_ENDPOINT is not as obstore expects it (it is not shown here); copy it again, from the "
                "portal or the tool that has made it"
            ) from None

    secrets = [value for name, value in os.environ.items() if name in _AZURE_CREDENTIALS]
    return ObstoreClient(where, make, hiding(secrets), has_suffixes=False)


def _client_options(endpoint: str, verify: bool | str) -> dict[str, Any]:
    """Options of obstore for a server of one's own. `verify`: its certificate, or the file of its authorities."""
    options: dict[str, Any] = {"allow_http": endpoint.startswith("http:")}
    if isinstance(verify, str):
        options["root_certificate"] = Path(verify).read_bytes()
    elif not verify:
        options["allow_invalid_certificates"] = True
    return options


def _gs(bucket: str, options: Mapping[str, Any]) -> ObjectClient:
    from mcore_ckpt.storage._gcs import GcsClient

    endpoint = options.get("endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST") or _GOOGLE
    if "://" not in endpoint:  # as Google's clients take it
        endpoint = f"http://{endpoint}"
    _check_endpoint(f"gs://{bucket}", endpoint, "STORAGE_EMULATOR_HOST")
    return GcsClient(bucket, endpoint)


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


_MAKERS: Final[dict[str, Callable[[str, Mapping[str, Any]], ObjectClient]]] = {"s3": _s3, "gs": _gs, "az": _az}


# Profiles of the multi-storage client


def path_of_profile(url: str) -> Path | None:
    """The local directory that a URL stands for, by a profile of type `file`; None for all others."""
    scheme, name, prefix = _parts(url)
    provider = _profile(url, name).get("storage_provider") or {} if scheme == "msc" else {}
    if provider.get("type") != "file":
        return None
    return Path("/", str((provider.get("options") or {}).get("base_path") or ""), prefix)


def _of_profile(url: str, name: str, prefix: str) -> tuple[ObjectClient, str]:
    """The client of a profile's bucket, and what keys there begin with."""
    profile = _profile(url, name)
    provider = profile.get("storage_provider") or {}
    kind, options = provider.get("type"), dict(provider.get("options") or {})
    base = str(options.pop("base_path", "") or "")
    bucket, _, base_prefix = base.strip("/").partition("/")
    if not bucket:  # the path below the profile begins with it
        bucket, _, prefix = prefix.partition("/")
    if not bucket:
        raise OptionError(f"{url}: neither the profile's base_path nor the URL names a bucket")
    path = f"{base_prefix}/{prefix}"
    if kind in _S3_PROFILES:
        credentials = _credentials(url, name, profile.get("credentials_provider"))
        return _client("s3", bucket, {**options, **credentials}), path
    if kind in ("gcs", "azure"):
        if profile.get("credentials_provider"):
            raise OptionError(
                f"{url}: the credentials_provider of profile {name!r} ({kind}) is not supported; leave it out, and let "
                "the environment provide the credentials"
            )
        return _client({"gcs": "gs", "azure": "az"}[kind], bucket, options), path
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
    return {"keys": tuple(options.get(each, "") for each in ("access_key", "secret_key", "session_token"))}


def _profile(url: str, name: str) -> Mapping[str, Any]:
    try:
        import multistorageclient.config  # noqa: F401
    except ImportError as error:
        raise OptionError(
            f"{url}: profiles are read by the multi-storage client, which cannot be imported ({error}); "
            "pip install multi-storage-client"
        ) from error
    if name == "__filesystem__":
        return {"storage_provider": {"type": "file", "options": {"base_path": "/"}}}
    try:
        config, path = _msc_config(*(os.environ.get(each) for each in ("MSC_CONFIG", *_WHERE_CONFIG_LIES)))
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


@lru_cache(maxsize=8)
def _msc_config(*where: str | None) -> tuple[Any, str | None]:
    """The client's configuration: comparing it with its schema takes a tenth of a second of processor time."""
    from multistorageclient.config import StorageClientConfig

    found: tuple[Any, str | None] = StorageClientConfig.read_msc_config()
    return found


def _expanded(value: Any) -> Any:
    """With variables of the environment put in, as the multi-storage client does."""
    if isinstance(value, str):
        return os.path.expandvars(value)
    if isinstance(value, Mapping):
        return {key: _expanded(item) for key, item in value.items()}
    return [_expanded(item) for item in value] if isinstance(value, list) else value
