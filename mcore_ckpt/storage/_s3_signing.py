"""Who asks an S3 store, and how a request says so: credentials, and the signature of version 4.

Credentials come from a profile of the multi-storage client, or else from where AWS's own tools look, by botocore:
environment, shared files, web identity, the instance. What expires is asked for again. No credential is ever shown:
not by `repr`, in no message, and never sent to another process.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, Final
from urllib.parse import quote

from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.storage._object_client import RequestError

# The body is not part of the signature: its checksum is, and TLS protects both.
_UNSIGNED: Final = "UNSIGNED-PAYLOAD"


@dataclass(frozen=True, slots=True)
class Credentials:
    """One set of them, as strings.

    Raises:
        OptionError: one cannot stand in a request's header.
    """

    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    token: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        for each in fields(self):
            if not all("!" <= character <= "~" for character in getattr(self, each.name)):
                raise OptionError(
                    f"the credentials for S3: {each.name} has a character that cannot be part of it, such as a space "
                    "or a newline at its end; it is not shown here. Set it again, without that character"
                )


@lru_cache(maxsize=8)
def botocore_session(profile: str | None, pid: int) -> Any:
    """botocore's session, one for each process; None without botocore."""
    try:
        import botocore.session
    except ImportError:
        return None
    return botocore.session.Session(profile=profile)


def credentials_of_aws(profile: str | None) -> Callable[[], Credentials]:
    """Credentials as AWS's own tools find them, asked for at each request, so that they never expire.

    Raises:
        OptionError: (by the function returned) there are none.
        RequestError: (by the function returned) who gives them out has failed; it may succeed later.
    """

    def current() -> Credentials:
        session = botocore_session(profile, os.getpid())
        try:
            found = None if session is None else session.get_credentials()
            frozen = None if found is None else found.get_frozen_credentials()
        except Exception as error:  # noqa: BLE001 (botocore's, and those of what it asks)
            # Their text may show what a process or a service has answered, credentials among it.
            text = f"credentials cannot be had: {type(error).__name__}, raised by botocore"
            raise RequestError(errno.EACCES, text, again=True) from None
        if frozen is not None:
            return Credentials(frozen.access_key, frozen.secret_key, frozen.token or "")
        environment = os.environ.get
        key, secret = environment("AWS_ACCESS_KEY_ID"), environment("AWS_SECRET_ACCESS_KEY")
        if key and secret:
            return Credentials(key, secret, environment("AWS_SESSION_TOKEN") or "")
        raise OptionError(
            "no credentials for S3 were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
            + ("" if session is not None else ", or install botocore, which looks further")
        )

    return current


def signed(
    method: str,
    host: str,
    path: str,
    query: Mapping[str, str],
    headers: Mapping[str, str],
    credentials: Credentials,
    region: str,
) -> tuple[str, dict[str, str]]:
    """A request with its signature.

    Args:
        method: of HTTP.
        host: with the port, if it is not the usual one.
        path: from the first slash on, not quoted.
        query: names and values, not quoted.
        headers: all that count.
        credentials: whose request it is.
        region: of the bucket.

    Returns:
        The request's target, and its headers.
    """
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    scope = f"{moment[:8]}/{region}/s3/aws4_request"
    all_headers = {**headers, "host": host, "x-amz-content-sha256": _UNSIGNED, "x-amz-date": moment}
    if credentials.token:
        all_headers["x-amz-security-token"] = credentials.token
    names = sorted(all_headers)
    where = quote(path, safe="/-_.~")
    asked = "&".join(f"{quote(name, safe='-_.~')}={quote(query[name], safe='-_.~')}" for name in sorted(query))
    canonical = "\n".join(
        [
            method,
            where,
            asked,
            *(f"{name}:{all_headers[name].strip()}" for name in names),
            "",
            ";".join(names),
            _UNSIGNED,
        ]
    )
    text = "\n".join(["AWS4-HMAC-SHA256", moment, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    key = ("AWS4" + credentials.secret_key).encode()
    for part in (*scope.split("/")[:1], region, "s3", "aws4_request", text):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    del all_headers["host"]  # which goes with every request
    all_headers["Authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={credentials.access_key}/{scope}, SignedHeaders={';'.join(names)}, "
        f"Signature={key.hex()}"
    )
    return f"{where}?{asked}" if asked else where, all_headers
