"""Credentials of object stores.

obstore reads the environment. When it finds nothing there, it asks the metadata service of a cloud's machine; on any
other machine it would wait minutes for an answer, so this module first probes the service. This module also reads AWS
profiles, which obstore does not.
"""

from __future__ import annotations

import http.client
import importlib
import os
from configparser import ConfigParser, Error
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from qie.errors import UsageError, one_line
from qie.stores.contract import StoreError
from qie.stores.object_errors import CREDENTIALS

PROBE_S = 1.0

# With any of these the store knows what to do without a metadata service.
_SETTINGS = {
    "s3": (
        "AWS_ACCESS_KEY_ID",
        "AWS_SKIP_SIGNATURE",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    ),
    "gs": (
        "GOOGLE_APPLICATION_CREDENTIALS",
        "GOOGLE_SERVICE_ACCOUNT",
        "GOOGLE_SERVICE_ACCOUNT_PATH",
        "GOOGLE_SERVICE_ACCOUNT_KEY",
        "GOOGLE_SKIP_SIGNATURE",
    ),
    "az": (
        "AZURE_STORAGE_ACCOUNT_KEY",
        "AZURE_STORAGE_ACCESS_KEY",
        "AZURE_STORAGE_MASTER_KEY",
        "AZURE_STORAGE_SAS_KEY",
        "AZURE_STORAGE_SAS_TOKEN",
        "AZURE_STORAGE_TOKEN",
        "AZURE_STORAGE_CLIENT_SECRET",
        "AZURE_CLIENT_SECRET",
        "AZURE_FEDERATED_TOKEN_FILE",
        "AZURE_USE_AZURE_CLI",
        "AZURE_SKIP_SIGNATURE",
        "AZURE_STORAGE_USE_EMULATOR",
        "IDENTITY_ENDPOINT",
    ),
}
_GCLOUD = "~/.config/gcloud/application_default_credentials.json"


def s3_settings() -> dict[str, Any]:
    """Arguments of obstore's S3Store beyond what it reads from the environment.

    Raises:
        StoreError: there are no credentials anywhere.
        UsageError: AWS_PROFILE names a profile that is not there.
    """
    profile = _aws_profile()
    config: dict[str, Any] = {
        # Bulk deletion is a request of its own, which many services of this kind lack.
        "disable_bulk_delete": True,
    }
    if not (os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")) and "region" in profile:
        config["region"] = profile["region"]
    if endpoint := s3_endpoint(profile):
        config["endpoint"] = endpoint
    if _is_set("s3"):
        return {"config": config}
    if "aws_access_key_id" in profile and "aws_secret_access_key" in profile:
        config["access_key_id"] = profile["aws_access_key_id"]
        config["secret_access_key"] = profile["aws_secret_access_key"]
        if "aws_session_token" in profile:
            config["session_token"] = profile["aws_session_token"]
        return {"config": config}
    if profile and (provider := _boto3_provider()) is not None:
        return {"config": config, "credential_provider": provider}
    _demand_metadata("s3")
    return {"config": config}


def s3_endpoint(profile: dict[str, str] | None = None) -> str | None:
    """The URL of the service when it is not AWS."""
    profile = _aws_profile() if profile is None else profile
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    return next((os.environ[name] for name in names if os.environ.get(name)), profile.get("endpoint_url"))


def demand_credentials(scheme: str) -> None:
    """Raise StoreError when a store of Google or Azure would find no credentials."""
    if scheme == "gs" and Path(_GCLOUD).expanduser().exists():
        return
    if not _is_set(scheme):
        _demand_metadata(scheme)


def _is_set(scheme: str) -> bool:
    return any(os.environ.get(name, "").lower() not in ("", "false", "0") for name in _SETTINGS[scheme])


def _aws_profile() -> dict[str, str]:
    """The settings of the profile AWS_PROFILE, or of the default one, in the files of the AWS tools."""
    name = os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE")
    files = {
        os.environ.get("AWS_CONFIG_FILE", "~/.aws/config"): f"profile {name}" if name else "default",
        os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"): name or "default",
    }
    found: dict[str, str] = {}
    for file, section in files.items():
        parser = ConfigParser(interpolation=None, default_section="")
        try:
            parser.read(Path(file).expanduser())
        except (Error, OSError, RuntimeError, UnicodeDecodeError) as error:
            raise UsageError("an AWS profile cannot be read", where=file, found=type(error).__name__) from error
        found.update(parser[section] if parser.has_section(section) else {})
    if name and not found and not _is_set("s3"):
        raise UsageError("no such AWS profile", where=f"AWS_PROFILE={name}", expected=" or ".join(files))
    return found


def _boto3_provider() -> Any:
    """Credentials of a profile that only boto3 can follow, as of single sign-on; None without them or boto3."""
    try:
        boto3 = importlib.import_module("boto3")  # without types
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        return None
    try:
        return Boto3CredentialProvider(boto3.Session())
    except Exception as error:
        # boto3 has dozens of errors and promises none; ValueError is the provider's own word for "nothing found".
        if isinstance(error, ValueError):
            return None
        line = one_line(error, 300)
        raise StoreError("an AWS profile gives no credentials", found=line, hint=CREDENTIALS["s3"]) from error


def _demand_metadata(scheme: str) -> None:
    """Raise StoreError unless this machine's cloud answers questions about it."""
    address, path, headers, answers = {
        "s3": (
            os.environ.get("AWS_METADATA_ENDPOINT") or "http://169.254.169.254",
            "/latest/meta-data/",
            {},
            (200, 401),  # 401: it wants to be asked in the newer way, as obstore does
        ),
        "gs": (
            f"http://{os.environ.get('GCE_METADATA_HOST') or 'metadata.google.internal'}",
            "/computeMetadata/v1/",
            {"Metadata-Flavor": "Google"},
            (200,),
        ),
        "az": (
            "http://169.254.169.254",
            "/metadata/instance?api-version=2021-02-01",
            {"Metadata": "true"},
            (200,),
        ),
    }[scheme]
    if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true" and scheme == "s3":
        answer = None
    else:
        answer = _answer(address, path, headers)
    if answer not in answers:
        raise StoreError(
            "no credentials for the store",
            expected="in the environment, in a profile, or from the cloud that this machine runs in",
            hint=CREDENTIALS[scheme],
        )


def _answer(address: str, path: str, headers: dict[str, str]) -> int | None:
    """The status of a web server's answer; None without an answer in time."""
    url = urlsplit(address)
    try:
        connection = http.client.HTTPConnection(url.hostname or "", url.port or 80, timeout=PROBE_S)
        try:
            connection.request("GET", path, headers=headers)
            return connection.getresponse().status
        finally:
            connection.close()
    except (OSError, ValueError, http.client.HTTPException):
        return None
